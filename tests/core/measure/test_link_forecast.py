"""A cache behind a link: the papers' byte rules, counted head by head, and what follows from them."""

import json

import pytest
import torch

from sfi_core.errors import ConfigError
from sfi_core.measure.bench import link_traffic
from sfi_core.measure.bench.architectures import empty_model, random_config
from sfi_core.measure.bench.forecast import forecast_document
from sfi_core.measure.bench.link import Assumptions, Link, Traffic, link_gb_per_s, step_time
from sfi_core.measure.bench.link_forecast import POLICIES, link_forecast_document
from sfi_core.measure.bench.link_traffic import Rows, share_of_heads
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.models.byte_model import ByteModel
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_shape import LayerShape

CPU = torch.device("cpu")
LAYERS = [LayerShape(heads=4, key_width=8, value_width=6, itemsize=2) for _ in range(3)]
ROW = (8 + 6) * 2  # bytes of a head's key and value
C, S, W, K = 1000, 4, 60, 200
ROWS = Rows(context=C, kept=S + W, selected=K)
ASSUMED = Assumptions(turnover=0.2, corrected=0.25)
WEIGHTS, BATCH = 90_000, 3
BASE = WEIGHTS / BATCH


def byte_model(dense_layers=()):
    layers = [
        {"layer": i, "heads": each.heads, "key_width": 8, "value_width": 6, "itemsize": 2, "window": None}
        for i, each in enumerate(LAYERS)
    ]  # fmt: skip
    described = {"weight_bytes": WEIGHTS, "layers": layers}
    return ByteModel.of(described, dense_layers=dense_layers, batch=BATCH)


def test_freekv_reads_its_pages_and_waits_for_corrected_heads_only():
    device, link = BASE, 0.0
    for layer in range(3):
        for _ in range(4):
            if layer == 0:
                device += C * ROW
                continue
            device += (S + K + W) * ROW + C / 32 * ROW
            link += 0.2 * K * ROW
    found = link_traffic.freekv(byte_model((0,)), ROWS, 32, ASSUMED)
    assert found.device_bytes == pytest.approx(device)
    assert found.link_bytes == pytest.approx(link)
    assert found.critical_bytes == pytest.approx(0.25 * link)


def test_quest_waits_for_all_that_it_recalls():
    heads = 3 * 4
    found = link_traffic.quest(byte_model(), ROWS, 16, ASSUMED)
    assert found.device_bytes == pytest.approx(BASE + heads * ROW * (S + K + W + C / 16))
    assert found.link_bytes == found.critical_bytes == pytest.approx(heads * ROW * 0.2 * K)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("representatives", "stride", "static"), [(2, 5, 0.5), (1, 3, 0.25)])
def test_synckv_is_the_mean_of_a_cycle(representatives, stride, static, sparse):
    device, link = 0.0, 0.0
    for step in range(stride):
        device += BASE
        for _ in LAYERS:
            for head in range(4):
                reads_all = head < representatives and (step == 0 or not sparse)
                device += (C if reads_all else S + K + W) * ROW
                if step == 0 and head >= representatives:
                    link += 0.2 * (1 - static) * K * ROW
    found = link_traffic.synckv(
        byte_model(), ROWS, ASSUMED, representatives=share_of_heads(LAYERS, representatives),
        stride=stride, static=static, sparse_suspension=sparse,
    )  # fmt: skip
    assert found.device_bytes == pytest.approx(device / stride)
    assert found.link_bytes == pytest.approx(link / stride)
    assert found.critical_bytes == 0


def test_sfi_streams_everything_at_slow_steps_and_waits():
    """19 fast steps and a slow one."""
    found = link_traffic.sfi(byte_model(), ROWS, fast=500.0, slow=9000.0, slow_rate=1 / 20)
    assert found.device_bytes == pytest.approx((19 * 500 + 9000) / 20)
    assert found.link_bytes == found.critical_bytes == pytest.approx(12 * ROW * (C + K) / 20)


def test_full_attention_moves_every_row_of_every_step_and_eviction_none():
    every = link_traffic.streamed(byte_model((1,)), ROWS)
    assert every.link_bytes == every.critical_bytes == 2 * 4 * ROW * C  # a dense layer is resident
    assert every.device_bytes == pytest.approx(BASE + 12 * ROW * C)
    evicted = link_traffic.resident(byte_model(), ROWS)
    assert (evicted.link_bytes, evicted.critical_bytes) == (0, 0)
    assert evicted.device_bytes == pytest.approx(BASE + 12 * ROW * (S + K + W))


def test_a_short_context_has_less_to_recall():
    short = Rows(context=100, kept=S + W, selected=K)
    assert (short.attended, short.recalled) == (100, 36)
    assert Rows(context=50, kept=S + W, selected=K).recalled == 0


@pytest.mark.parametrize(
    ("link_bytes", "critical", "hidden", "step"),
    [(100e6, 0, 4, 10), (100e6, 25e6, 3, 11), (500e6, 0, 10, 20), (500e6, 400e6, 4, 26)],
)
def test_a_step_hides_at_most_its_own_device_time(link_bytes, critical, hidden, step):
    """Two requests of 5 GB at 1,000 GB/s are 10 ms; the link's 50 GB/s takes 4 or 20 ms."""
    moved = Traffic(device_bytes=5e9, link_bytes=link_bytes, critical_bytes=critical)
    time = step_time(moved, 2, 1000, 50)
    assert (time.device_ms, time.hidden_ms) == (pytest.approx(10), pytest.approx(hidden))
    assert time.step_ms == pytest.approx(step)


@pytest.mark.parametrize(
    ("text", "value"), [("pcie4", 25), ("PCIe5", 50), ("31.5", 31.5), (" 400 ", 400)]
)
def test_a_link_is_a_name_or_a_bandwidth(text, value):
    assert link_gb_per_s(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "pcie9", ""])
def test_any_other_link_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        link_gb_per_s(text)
    assert str(caught.value) == (
        f"link must be GB/s such as 25, or one of ('pcie4', 'pcie5'), got {text!r}"
    )


@pytest.fixture(scope="module")
def llama():
    return empty_model(random_config("llama-3.1-8b"), torch.device("meta"), torch.bfloat16)


@pytest.fixture
def rows(llama):
    """Return the rows of a point by policy."""

    def forecast(context=131072, batch=1, gb_per_s=25.0, turnover=0.1, memory=40e9, **changes):
        asked = DecodeSettings(
            policies=POLICIES, contexts=(context,), batches=(batch,), config=SfiConfig(**changes)
        )
        link = Link(gb_per_s=gb_per_s, assumed=Assumptions(turnover=turnover, corrected=0.1))
        document = link_forecast_document(
            llama, asked, CPU, link, bandwidth_gb_per_s=1000, memory_bytes=memory
        )
        json.dumps(document)
        assert document["link"] == {"gb_per_s": gb_per_s, "turnover": turnover, "corrected": 0.1}
        return {row["policy"]: row for row in document["rows"]}

    return forecast


def test_a_model_s_rows_follow_the_rules(rows):
    """32 layers of 8 KV heads; a layer's row has 4,096 bytes."""
    found, layer, kept = rows(sink=4, recent=256, budget=2048), 4096, 4 + 2048 + 256
    context, weights = 131072, 2 * (8_030_261_248 - 128256 * 4096)
    wanted = {  # device bytes, link bytes
        "freekv": (layer * (context + 31 * (kept + context / 32)), layer * 31 * 0.1 * 2048),
        "quest": (layer * 32 * (kept + context / 16), layer * 32 * 0.1 * 2048),
        "synckv": (layer * 8 * (context + 3 * kept), layer * 24 * 0.1 * 0.5 * 2048 / 5),
        "snapkv": (layer * 32 * kept, 0),
        "streaming-llm": (layer * 32 * kept, 0),
        "full-kv": (layer * 32 * context, layer * 32 * context),
    }
    for policy, (device, link) in wanted.items():
        assert found[policy]["bytes_per_step"] == pytest.approx(weights + device, rel=1e-6), policy
        assert found[policy]["link_bytes_per_step"] == pytest.approx(link, abs=1), policy
    assert found["sfi"]["link_bytes_per_step"] == pytest.approx(
        layer * 32 * (context + 2048) / 20, abs=1
    )
    assert {name: row["hidden_share"] for name, row in found.items()} == {
        "freekv": pytest.approx(0.9), "synckv": pytest.approx(1), "quest": 0, "sfi": 0, "full-kv": 0,
        "snapkv": None, "streaming-llm": None,
    }  # fmt: skip


def test_without_a_link_sfi_reads_what_it_reads_on_the_device(rows, llama):
    asked = DecodeSettings(contexts=(131072,), policies=("sfi",), config=SfiConfig())
    (alone,) = forecast_document(llama, asked, CPU, bandwidth_gb_per_s=1000, memory_bytes=40e9)[
        "rows"
    ]
    behind = rows()["sfi"]
    assert behind["bytes_per_step"] == pytest.approx(alone["bytes_per_step"], abs=1)
    assert behind["memory_bytes"] < alone["memory_bytes"]
    fast = rows(gb_per_s=1e9)["sfi"]
    assert fast["speedup_over_resident"] == pytest.approx(alone["roofline_speedup"], rel=1e-3)


def test_tokens_a_second_are_the_batch_over_the_step(rows):
    one, four = rows()["quest"], rows(batch=4)["quest"]
    assert one["roofline_tokens_per_second"] == pytest.approx(1000 / one["step_ms"])
    assert four["roofline_tokens_per_second"] == pytest.approx(4000 / four["step_ms"])
    assert four["link_ms"] == pytest.approx(4 * one["link_ms"])
    assert four["device_ms"] < 2 * one["device_ms"]  # the weights are shared


def test_the_device_holds_what_each_policy_needs(rows, llama):
    """Of 131,116 tokens: 44 decoded; pages of 64; a layer's row has 4,096 bytes, a representative's 512."""
    found, tokens = rows(), 131072 + 44
    paged = 64 * -(-tokens // 64)

    row, ranked = 4096, 4096 + 8 * 4  # with a float32 norm or an int32 position a head
    norms, chosen = 32 * 8 * 4 * paged, 32 * 128 * 2 + 8 * 4 * 2048  # a note's query and selection
    summary = 8 * 4 * (2 * 128 + 1)  # two vectors and a score, float32

    def cache(recent, packed, layers=32):
        ring = 64 * (-(-(recent + 63) // 64) + 1)
        segment = ranked * packed + 8 * 4
        return 32 * ranked * ring + (layers + 1) * segment + 2 * row * 1024

    assert {policy: row["kv_device_bytes"] for policy, row in found.items()} == {
        "sfi": cache(256 + 20, 2052) + norms + 32 * chosen,
        "snapkv": cache(256 + 44, 2052) + norms + 32 * chosen,
        "quest": cache(256, 2052) + norms + 32 * (chosen + summary * -(-tokens // 16)),
        "freekv": cache(256, 2052, 31) + norms + 31 * (chosen + summary * -(-tokens // 32))
        + row * paged,
        "synckv": cache(256, 2052) + norms + 32 * (chosen + 2 * 512 * paged),
        "full-kv": cache(256, 4),
        "streaming-llm": cache(256 + 2048, 4) + norms,
    }  # fmt: skip
    assert {row["kv_host_bytes"] for row in found.values()} == {32 * 4096 * paged}
    asked = DecodeSettings(contexts=(131072,), policies=("sfi", "full-kv"), config=SfiConfig())
    alone = forecast_document(llama, asked, CPU, bandwidth_gb_per_s=1000, memory_bytes=40e9)
    for row in alone["rows"]:  # what is not cache stays
        behind = found[row["policy"]]
        rest = 2 * 8_030_261_248 + row["workspace_bytes"]
        assert behind["memory_bytes"] == rest + behind["kv_device_bytes"]


def test_the_largest_context_fits_and_one_more_token_does_not(rows):
    most = {policy: row["largest_context"] for policy, row in rows().items()}
    assert most["full-kv"] is None  # only host memory bounds it
    for policy in ("quest", "synckv", "streaming-llm"):
        assert rows(context=most[policy])[policy]["fits"]
        assert not rows(context=most[policy] + 1)[policy]["fits"]
    assert most["quest"] > 131072


def test_other_policies_have_no_rule(llama):
    link = Link(gb_per_s=25, assumed=ASSUMED)
    with pytest.raises(ConfigError, match=r"forecast over a link knows .*, got 'random-k'"):
        link_forecast_document(llama, DecodeSettings(policies=("random-k",)), CPU, link)
