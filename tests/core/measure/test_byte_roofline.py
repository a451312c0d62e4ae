"""Models without weights and what their bytes promise; how a method is written, and what it reads at a size."""

import copy
from fractions import Fraction
from functools import cache

import pytest
import torch

from sfi_core import SfiConfig, slow_fast
from sfi_core.errors import ConfigError, InputError, UnsupportedModelError
from sfi_core.hosts.transformers.shapes import layer_shapes
from sfi_core.measure.bench import byte_roofline
from sfi_core.measure.bench.architectures import empty_model, random_config, random_model
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.measure.evaluation.grid import Method, at_share, at_sizes
from sfi_core.models.describe import ModelWeights
from sfi_core.policies import POLICIES
from sfi_core.policies.built_in.codescan import choosing_tokens
from sfi_core.policies.page_bounds import extremes_bytes
from tests.architectures import WORKS, tiny

META, CPU = torch.device("meta"), torch.device("cpu")
# layers, KV heads, billions of weights, GB of them, KV bytes a token: T1
T1 = {
    "qwen3-0.6b": (28, 8, 0.60, 1.19, 114_688),
    "qwen3-4b": (36, 8, 4.02, 8.04, 147_456),
    "qwen3-8b": (36, 8, 8.19, 16.38, 147_456),
    "qwen3-30b-a3b": (48, 4, 30.53, 61.06, 98_304),
    "llama-3.1-8b": (32, 8, 8.03, 16.06, 131_072),  # FreeKV's two models, by their model cards
    "qwen2.5-7b": (28, 4, 7.62, 15.23, 57_344),
}
T2 = {  # GB of weights that a step reads at batch 1, 4, 16, 32
    "qwen3-0.6b": (1.19, 1.19, 1.19, 1.19),
    "qwen3-4b": (8.04, 8.04, 8.04, 8.04),
    "qwen3-8b": (15.14, 15.14, 15.14, 15.14),
    "qwen3-30b-a3b": (6.08, 15.65, 39.80, 53.09),
}
T4 = [  # context, batch: GB dense and fast, tokens/s at 4.3 TB/s dense and at 1/20, speed-up
    ("qwen3-0.6b", 8, 1, 2.13, 1.46, 2017, 2837, 1.41),
    ("qwen3-0.6b", 32, 4, 16.22, 2.25, 1060, 5607, 5.29),
    ("qwen3-0.6b", 32, 16, 61.32, 5.43, 1122, 7913, 7.05),
    ("qwen3-4b", 8, 16, 27.37, 13.49, 2513, 4680, 1.86),
    ("qwen3-4b", 128, 4, 85.35, 9.41, 202, 1279, 6.35),
    ("qwen3-8b", 32, 16, 92.45, 20.58, 744, 2775, 3.73),
    ("qwen3-30b-a3b", 8, 4, 18.87, 16.56, 911, 1026, 1.13),
    ("qwen3-30b-a3b", 128, 16, 245.96, 43.43, 280, 1269, 4.54),
]


shapes_once = cache(layer_shapes)  # a pass over the layers of a large model takes longer than its forecast


@pytest.fixture(autouse=True)
def _forecasts_look_once(monkeypatch):
    monkeypatch.setattr(byte_roofline, "layer_shapes", shapes_once)


@cache
def meta(name):
    return empty_model(random_config(name), META, torch.bfloat16)


def forecast(name, context, batch, *, config=None, memory=150e9, policies=("full-kv", "sfi"), **changes):
    asked = DecodeSettings(
        contexts=(context,), batches=(batch,), config=config or SfiConfig.preset("paper"),
        policies=policies, warm_up=4, **changes,
    )  # fmt: skip
    return byte_roofline.forecast_document(meta(name), asked, CPU, bandwidth_gb_per_s=4300, memory_bytes=memory)


@pytest.mark.parametrize("name", T1)
def test_named_architectures_are_those_of_the_notes(name):
    layers, heads, billions, total, row = T1[name]
    shapes = shapes_once(meta(name))
    weights = ModelWeights.of(meta(name))
    assert (len(shapes), shapes[0].heads) == (layers, heads)
    assert weights.total_bytes / 2e9 == pytest.approx(billions, abs=0.006)
    assert weights.total_bytes / 1e9 == pytest.approx(total, abs=0.006)
    assert sum(shape.row_bytes for shape in shapes) == row


@pytest.mark.parametrize("name", T2)
def test_weights_that_a_step_reads_grow_with_the_batch_of_a_mixture_only(name):
    weights = ModelWeights.of(meta(name))
    for batch, expected in zip((1, 4, 16, 32), T2[name], strict=True):
        assert weights.read(batch) / 1e9 == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("name", "context", "batch", "dense", "fast", "dense_rate", "rate", "speedup"), T4)
def test_forecasts_are_those_of_the_notes(name, context, batch, dense, fast, dense_rate, rate, speedup):
    full, sfi = forecast(name, context * 1024, batch)["rows"]
    assert full["bytes_per_step"] / 1e9 == pytest.approx(dense, abs=0.011)
    assert sfi["fast_bytes_per_step"] / 1e9 == pytest.approx(fast, abs=0.006)
    assert full["roofline_tokens_per_second"] == pytest.approx(dense_rate, rel=1e-3, abs=0.6)
    assert sfi["roofline_tokens_per_second"] == pytest.approx(rate, rel=1e-3, abs=0.6)
    assert sfi["roofline_speedup"] == pytest.approx(speedup, abs=0.006)
    assert full["roofline_speedup"] == 1


def test_the_largest_batch_fits_and_one_more_does_not():
    _, sfi = forecast("qwen3-4b", 32768, 1, memory=60e9)["rows"]
    most = sfi["largest_batch"]
    for batch, fits in ((most, True), (most + 1, False)):
        row = forecast("qwen3-4b", 32768, batch, memory=60e9)["rows"][1]
        assert row["fits"] is fits
        assert (row["memory_bytes"] <= 60e9) is fits
    assert forecast("qwen3-4b", 32768, 1, memory=1e9)["rows"][1]["largest_batch"] == 0


def test_break_even_is_the_context_from_which_sfi_reads_less():
    _, sfi = forecast("qwen3-4b", 8192, 1)["rows"]
    context = sfi["break_even_context"]
    assert 4 + 2048 + 256 < context < 3000
    for tokens, gains in ((context - 1, False), (context, True)):
        speedup = forecast("qwen3-4b", tokens, 1)["rows"][1]["roofline_speedup"]
        assert (speedup > 1) is gains
    assert forecast("qwen3-4b", 8192, 16)["rows"][1]["break_even_context"] == context
    always = forecast("qwen3-4b", 8192, 1, slow_rate=Fraction(1))["rows"][1]
    assert always["break_even_context"] is None
    assert always["roofline_speedup"] < 1


def test_every_policy_has_a_forecast_of_what_its_own_hooks_read():
    """Qwen3-4B at 32K, batch 4: 8 KV heads of 128 numbers in 36 layers, in tokens' worth of keys and values."""
    length, row, config = 32768, 147_456, SfiConfig.preset("paper").replace(synckv={"heads": "even"})
    rows = {r["policy"]: r for r in forecast("qwen3-4b", length, 4, config=config, policies=tuple(POLICIES))["rows"]}
    base, packed = rows["full-kv"]["weight_bytes_per_step"], 4 + 2048
    fast = {
        "sfi": packed + 256,
        "streaming-llm": packed + 256,
        "snapkv": packed + 256,
        "random-k": packed + 256,
        "codescan": packed + 256 + choosing_tokens(length, 128) + 1,
        "quest": packed + 256 + length / 16,
        "oracle-top-k": packed + 256 + length / 2,
        "synckv": 0.75 * (packed + 256 + 2.5) + 0.25 * length,  # two of eight heads are dense; 5 steps between two
    }
    for name, tokens in fast.items():
        assert rows[name]["fast_bytes_per_step"] == pytest.approx(base + 4 * row * tokens, rel=1e-6), name
    rates = {"full-kv": 1, "sfi": 0.05, "random-k": 0.05, "synckv": 0.2}
    assert {name: r["slow_rate"] for name, r in rows.items() if r["slow_rate"]} == {"prior-only": 0.05} | rates
    freekv = rows["freekv"]["fast_bytes_per_step"]  # its first layer is dense
    assert freekv == pytest.approx(base + 4 * row / 36 * (35 * (packed + 256 + length / 32) + length), rel=1e-6)
    codescan, quest = rows["codescan"], rows["quest"]
    assert (codescan["slow_bytes_per_step"], rows["full-kv"]["fast_bytes_per_step"]) == (None, None)
    capacity = length + 4 + 40
    pages = extremes_bytes(shapes_once(meta("qwen3-4b"))[0], capacity, 16)
    assert quest["packed_bytes"] == 4 * 36 * pages  # its rows are read in place
    assert 0 < codescan["packed_bytes"] < quest["packed_bytes"]  # codes, and no rows
    assert rows["full-kv"]["packed_bytes"] == rows["streaming-llm"]["packed_bytes"]
    for context, gains in ((codescan["break_even_context"] - 1, False), (codescan["break_even_context"], True)):
        (row_there,) = forecast("qwen3-4b", context, 4, config=config, policies=("codescan",))["rows"]
        assert (row_there["roofline_speedup"] > 1) is gains


@pytest.mark.parametrize("label", [works.label for works in WORKS])
def test_shapes_without_weights_are_those_of_a_run(label):
    model = tiny(label)
    empty = empty_model(copy.deepcopy(model.config), META, torch.float32)
    if label in ("gpt-2", "opt"):  # they look at their input for padding
        with pytest.raises(UnsupportedModelError, match="its forward pass depends on data"):
            layer_shapes(empty)
        return
    with slow_fast(model, None, SfiConfig(trigger_policy="never")) as session:
        assert layer_shapes(empty) == session.shapes()


@pytest.mark.parametrize("label", ["qwen3", "gpt-oss", "deepseek-v3", "gemma-2", "gpt-neox"])
def test_random_weights_of_any_architecture_give_finite_logits(label, tmp_path):
    tiny(label).config.to_json_file(tmp_path / "config.json")
    config = random_config(str(tmp_path / "config.json"))
    model = random_model(config, CPU, torch.bfloat16, seed=3)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = model(input_ids=torch.arange(2, 40)[None]).logits.float()
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert not any(weight.isnan().any() for weight in model.parameters())


def test_random_weights_are_the_seeds_and_share_what_is_tied(tmp_path):
    tiny("qwen3").config.to_json_file(tmp_path / "config.json")
    config = random_config(str(tmp_path / "config.json"))
    config.tie_word_embeddings = True
    model, same, other = (random_model(config, CPU, torch.float32, seed) for seed in (1, 1, 2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    matrix = model.model.layers[0].mlp.up_proj.weight.detach()
    assert matrix.abs().max() <= 0.035
    assert matrix.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(matrix[0], matrix[1])
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))


def test_a_config_that_is_none_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"config of .*bad\.json cannot be read"):
        random_config(str(tmp_path / "bad.json"))
    with pytest.raises(InputError, match=r"random weights must be one of .* got 'qwen3-5b'"):
        random_config("qwen3-5b")


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("sfi:span=10,slow_start=2", {"span": 10, "slow_start": 2}),
        ("sfi:selector.eta=0,selector.radius=5", {"selector": {"eta": 0, "radius": 5}}),
        ("sfi:trigger_policy=t-max , t_max=8", {"trigger_policy": "t-max", "t_max": 8}),
        (
            'sfi:triggers=[".", ",]\\n"],dense_layers=[0,1],span=1',
            {"triggers": (".", ",]\n"), "dense_layers": (0, 1), "span": 1},
        ),
        ("quest:baseline.page=32", {"baseline": {"page": 32}}),
        ("freekv:freekv.tau=0.9,freekv.page=16", {"freekv": {"tau": 0.9, "page": 16}}),
    ],
)
def test_settings_follow_a_colon(text, changes):
    method = Method.parse(text)
    assert method.label == text
    assert method.config == SfiConfig().replace(**changes)


def test_settings_of_a_table_keep_the_preset_s_others():
    method = Method.parse("freekv@freekv-long-generation:freekv.page=16")
    assert (method.config.freekv.page, method.config.freekv.tau) == (16, 0.9)
    assert method.config.sink == 512


def test_a_file_is_a_preset_that_keeps_its_sizes(tmp_path):
    file = tmp_path / "tuned.toml"
    file.write_text(SfiConfig().replace(t_max=8, budget=77).to_toml())
    method = Method.parse(f"tuned=sfi@{file}")
    (sized,) = at_sizes([method], shares=[0.1, 0.2])
    assert sized.key == ("tuned", "own")
    assert sized.config_for(1000) == SfiConfig().replace(t_max=8, budget=77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sfl", "method sfl: unknown policy 'sfl'; did you mean 'sfi'? expected one of ('"),
        ("sfi@fast", "method sfi@fast: unknown preset 'fast'; expected one of ('default'"),
        ("sfi:spam=1", "method sfi:spam=1: unknown setting 'spam'; did you mean span?"),
        ("sfi:span=wide", "method sfi:span=wide: span must be int, got 'wide'"),
        ("sfi:span=10x", "method sfi:span=10x: span must be int, got '10x'"),
        ("sfi:span=", "method sfi:span=: span must be int, got ''"),
        ("sfi:span=-1", "method sfi:span=-1: span must be at least 0, got -1"),
        ("sfi:span", "method sfi:span: setting must be key=value, got 'span'"),
        ("sfi:span=1,span=2", "method sfi:span=1,span=2: setting span must be given once"),
        ("sfi:selector.alpha=0", "method sfi:selector.alpha=0: alpha must be in (0, 1], got 0.0"),
        ("", "method must be POLICY[@PRESET][:key=value,...], got ''"),
        ("sfi:", "method must be POLICY[@PRESET][:key=value,...], got 'sfi:'"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(ConfigError) as caught:
        Method.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("share", "context", "sizes"), [(0.1, 4096, (4, 277, 128)), (0.05, 1024, (4, 22, 25)), (1.0, 4096, (4, 3964, 128))]
)
def test_a_share_is_sink_and_recent_and_selected_tokens(share, context, sizes):
    config = at_share(SfiConfig().replace(recent=128), context, share)
    assert (config.sink, config.budget, config.recent) == sizes
    assert sum(sizes) == int(share * context)


def test_a_method_may_have_a_recent_window_of_its_own():
    method, other = at_sizes([Method.parse("sfi:recent=40"), Method.parse("sfi@paper")], shares=[0.25], recent=60)
    assert (method.config_for(1024).recent, other.config_for(1024).recent) == (40, 60)


@pytest.mark.parametrize(("text", "size"), [("full-kv", "all"), ("sfi:budget=7", "own")])
def test_what_no_share_changes_runs_once(text, size):
    (method,) = at_sizes([Method.parse(text)], shares=[0.1, 0.2])
    assert method.key == (text, size)
    assert method.config_for(1000) == Method.parse(text).config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"shares": [0.0]}, "share must be in (0, 1], got 0"),
        ({"shares": [1.5]}, "share must be in (0, 1], got 1.5"),
        ({"shares": [0.1], "recent": 0}, "recent must be positive, got 0"),
        ({"shares": []}, "share must be given at least once, got none"),
        ({"shares": [0.5, 0.5]}, "each share must differ, got 0.5, 0.5"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(ConfigError) as caught:
        at_sizes([Method.parse("sfi")], **sizes)
    assert str(caught.value) == message


def test_columns_are_plain():
    (method,) = at_sizes([Method.parse("wide=sfi:span=3")], shares=[0.1])
    assert method.columns(1000) == {
        "method": "wide", "policy": "sfi", "preset": "default", "settings": {"span": 3}, "size": "10%",
        "share": 0.1, "budget": 46, "recent": 50,
    }  # fmt: skip
