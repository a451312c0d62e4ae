"""Whole runs under a device budget: the tokens are those of runs whose whole cache is on the device."""

from functools import cache

import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, SfiConfig, slow_fast
from sfi_core.measure.evaluation.tasks import find_task
from sfi_core.models.load import BUNDLED, load
from sfi_core.policies.built_in import codescan
from sfi_core.settings.engine import DeviceBudget, EngineOptions
from sfi_core.state.side_stream import SideStream
from tests.architectures import prompts, tiny
from tests.covering import each_value, first
from tests.fakes import RecordingObserver, tokens, use_references
from tests.schedules import AnyTime, Lazy, Watching

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="schedules of CPU tensors")

ROWS = prompts(150, 61, 5)
NEW = 10
NOTHING = {}
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=3, recent=8, budget=10, t_max=4, window_prefill=4,
    trigger_token_ids=tuple(range(0, 300, 9)),
).replace(
    synckv={"heads": "even", "stride": 4},
    freekv={"page": 8, "tau": 0.7},
    baseline={"page": 8},
)  # fmt: skip
METHODS = {
    "sfi": ("sfi", {}),
    "sliding": ("sfi", {"recent_mode": "sliding", "dense_layers": (1,)}),
    "snapkv": ("snapkv", {}),
    "quest": ("quest", {}),
    "codescan": ("codescan", {}),
    "freekv": ("freekv", {}),
    "freekv without a dense layer": ("freekv", {"freekv": {"first_layer_dense": False}}),
    "synckv": ("synckv", {}),
    "synckv sparse": ("synckv", {"synckv": {"suspension": "sparse"}}),
    "streaming-llm": ("streaming-llm", {}),
}
BESIDE = ("sfi", "codescan", "synckv", "freekv", "quest")


def tight(method: str) -> str:
    """Return a budget without room for a layer; `codescan` has codes of every key, and queries of 128 tokens."""
    return "340kB" if method == "codescan" else "110kB"


def complete(
    method: str = "sfi", budget: str | None = None, label: str = "qwen3", *, page: int = 8,
    changes: dict = NOTHING, **options
):  # fmt: skip
    """Complete the prompts; with a budget under two tiers."""
    policy, settings = METHODS.get(method, (method, {}))
    config = CONFIG.replace(**{**settings, **changes})
    engine = {name: options.pop(name) for name in ("backend", "prefill_chunk") if name in options}
    return sfi_core.generate(
        tiny(label), None, options.pop("rows", ROWS), config, policy=policy,
        stop_token_ids=(), engine=EngineOptions(kv_device_budget=budget, kv_page=page, **engine),
        **{"max_new_tokens": NEW, **options},
    )  # fmt: skip


@cache
def on_the_device(method: str, label: str = "qwen3") -> list[list[int]]:
    return tokens(complete(method, label=label))


@pytest.mark.parametrize(("method", "page"), each_value([*METHODS, "prior-only", "random-k"], [1, 3, 8]))
def test_a_budget_changes_no_token(method: str, page: int):
    result = complete(method, tight(method), page=page)
    assert tokens(result) == on_the_device(method)
    tiers = result.report.kv_tiers
    assert tiers.device_bytes <= tiers.allowed_bytes
    assert method == "codescan" or tiers.allowed_bytes < tiers.host_bytes
    assert tiers.offloaded_bytes > 0


@pytest.mark.parametrize(
    ("label", "method"),
    first(
        each_value(
            ["gemma-2", "gpt-oss", "cohere-2", "deepseek-v3", "gpt-2", "falcon-h1", "gemma-4"],
            ["sfi", "freekv", "synckv"],
        ),
        3,
    ),
)
def test_a_budget_changes_no_token_of_other_architectures(label: str, method: str):
    ours = tokens(complete(method, "1MB", label))
    assert ours == on_the_device(method, label)


@pytest.mark.parametrize(
    ("method", "options"),
    first(each_value(METHODS, [{"max_batch": 1}, {"prefill_chunk": 7}, {"max_batch": 2}]), 3),
    ids=str,
)
def test_neither_waiting_nor_chunks_change_a_token(method: str, options: dict):
    expected = tokens(complete(method, **options))
    assert tokens(complete(method, tight(method), **options)) == expected


@pytest.mark.parametrize("method", ["snapkv", "sfi"])
def test_a_short_prompt_that_generates_much_keeps_its_recent_tokens(method: str):
    """Its window grows by what it generates, not by what the capacity leaves the longest prompt."""
    options = {"rows": prompts(130, 20), "max_new_tokens": [2, 70]}
    changes = {"trigger_policy": "never"}
    expected = tokens(complete(method, changes=changes, **options))
    assert tokens(complete(method, "500kB", changes=changes, **options)) == expected


def test_all_heads_of_a_resident_layer_are_read_from_the_device():
    """FreeKV's first layer is left dense: with room for the layer, dense reads stream nothing."""
    little, much = (complete("freekv", budget) for budget in ("100kB", "400kB"))
    assert tokens(little) == tokens(much) == on_the_device("freekv")
    streamed = [result.report.kv_tiers.streamed_bytes for result in (little, much)]
    assert streamed[1] < streamed[0] / 2


def test_layers_that_fit_the_budget_stay_on_the_device():
    """Slow steps of `sfi` read the others from the host."""
    none, one, all_of_them = (complete("sfi", budget) for budget in ("110kB", "230kB", "1MB"))
    assert tokens(none) == tokens(one) == tokens(all_of_them) == on_the_device("sfi")
    streamed, hosted = zip(
        *((r.report.kv_tiers.streamed_bytes, r.report.kv_tiers.host_bytes) for r in (none, one, all_of_them)),
        strict=True,
    )
    assert hosted == (hosted[0], hosted[0] // 2, 0)
    assert 0 == streamed[2] < streamed[1] < streamed[0]


@pytest.mark.parametrize(("method", "label"), each_value(METHODS, ["qwen3", "deepseek-v3"]))
def test_the_forecast_is_a_close_upper_bound(method: str, label: str):
    """The device's bytes stay under the budget because the forecast does."""
    rows, (policy, settings) = prompts(90, 90), METHODS[method]
    tiers = complete(method, "600kB", label, rows=rows).report.kv_tiers
    options = EngineOptions(kv_device_budget="600kB", kv_page=8)
    with slow_fast(tiny(label), None, CONFIG.replace(**settings), policy=policy, engine=options) as session:
        expected, _ = session.tiers.planned(2, 90 + NEW, NEW)
    assert expected.host_bytes == tiers.host_bytes
    assert tiers.device_bytes <= expected.device_bytes <= 1.05 * tiers.device_bytes


@pytest.fixture(scope="module")
def bundled():
    model, tokenizer = load(str(BUNDLED))
    return model, tokenizer, find_task("bundled-recall").sample(tokenizer, 2800, 0).prompt


@pytest.mark.parametrize("policy", first(["sfi", "freekv"]))
def test_shares_of_a_long_prompt_give_its_answer(bundled, policy: str):
    """Fixed parts are small beside 2,800 tokens: a tenth of the cache is enough."""
    model, tokenizer, prompt = bundled
    config = SfiConfig(recent=16, budget=32, t_max=8).replace(freekv={"first_layer_dense": False, "page": 64})

    def answer(budget: str | None):
        return sfi_core.generate(
            model, tokenizer, [prompt], config, policy=policy, max_new_tokens=8,
            engine=EngineOptions(kv_device_budget=budget, kv_page=16),
        )  # fmt: skip

    expected = answer(None)
    for share in ("10%", "50%"):
        result = answer(share)
        tiers = result.report.kv_tiers
        assert result.texts == expected.texts
        assert tiers.device_bytes <= DeviceBudget.parse(share).bytes_of(tiers.host_bytes)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch):
    """Complete with a side of one's own for the store."""

    def run(method: str, side, **options):
        monkeypatch.setattr("sfi_core.hosts.transformers.stores.side_of", lambda *_, **__: side)
        return complete(method, tight(method), observers=[Watching(side)], **options)

    return run


@pytest.mark.parametrize(
    ("method", "side", "options"),
    first(
        each_value(
            BESIDE,
            [Lazy, lambda: AnyTime(0), lambda: AnyTime(1)],
            [{}, {"max_batch": 1, "max_new_tokens": [3, 6, NEW]}],
        ),
        2,
    ),
)
def test_every_legal_schedule_gives_what_the_code_s_order_gives(beside, method: str, side, options: dict):
    stream, expected = side(), beside(method, SideStream(), **options)
    outcome = beside(method, stream, **options)
    assert tokens(outcome) == tokens(expected)
    ours, theirs = (result.report.kv_tiers for result in (outcome, expected))
    assert ours.recalled_bytes == theirs.recalled_bytes > 0
    assert ours.offloaded_bytes == theirs.offloaded_bytes
    assert stream.most > 1, "jobs were late"


@pytest.mark.parametrize("method", ["sfi", "freekv"])
def test_a_step_that_does_not_wait_for_its_rows_shows(beside, monkeypatch: pytest.MonkeyPatch, method: str):
    """Or the schedules above would not find fault with code that waits nowhere."""
    expected = tokens(beside(method, SideStream()))
    side = Lazy()
    side.wait = lambda _: None  # type: ignore[method-assign]
    side.join = lambda: None  # type: ignore[method-assign]
    assert tokens(beside(method, side)) != expected


@pytest.mark.parametrize("method", ["sfi", "synckv"])
def test_observers_and_audits_change_nothing_and_add_up(method: str):
    observer = RecordingObserver()
    result = complete(method, tight(method), observers=[observer], audit=AuditConfig(every=2))
    plain = complete(method, observers=[other := RecordingObserver()], audit=AuditConfig(every=2))
    assert tokens(result) == tokens(plain) == on_the_device(method)
    recalled_bytes = sum(int(e.rows_H.sum()) * e.row_bytes for e in observer.recalls if e.step > 0)
    tiers = result.report.kv_tiers
    assert recalled_bytes == tiers.recalled_bytes > 0
    steps = len(result.report.requests[0].token_ids) - 1
    assert tiers.recalled_bytes_per_step == pytest.approx(recalled_bytes / steps)
    assert len(observer.audits) == len(other.audits) > 0
    for ours, theirs in zip(observer.audits, other.audits, strict=True):
        assert (ours.request, ours.step, ours.layer) == (theirs.request, theirs.step, theirs.layer)
        torch.testing.assert_close(ours.retained_H, theirs.retained_H)


@pytest.mark.parametrize("method", first(BESIDE, 3))
def test_the_triton_backend_gives_the_tokens_of_its_whole_cache(monkeypatch: pytest.MonkeyPatch, method: str):
    """With the kernels' references: the next test runs the kernels. `codescan` learns its bases again."""
    use_references(monkeypatch)
    monkeypatch.setattr(codescan, "RELEARN", 3)
    options = {
        "backend": "triton", "page": 16, "rows": prompts(90, 37), "changes": {"recent": 16}, "max_new_tokens": 6,
    }  # fmt: skip
    expected = tokens(complete(method, **options, page_size=16))
    assert tokens(complete(method, "500kB", **options)) == expected


def test_the_kernels_run_under_a_budget():
    pytest.importorskip("triton")
    options = {"page": 16, "rows": prompts(60), "max_new_tokens": 4, "changes": {"recent": 16}}
    result = complete("quest", "1MB", backend="triton", **options)
    assert tokens(result) == tokens(complete("quest", "1MB", **options))
    assert {"append", "recall"} <= {kernel.name for kernel in result.report.kernels}
