"""The kernel benchmark's core: settings, bytes, the gate before the clock, the clock's order, the rows."""

import pytest
import torch

from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.measure.kernel_bench import bench
from sfi_core.measure.kernel_bench.bench import WrongResultError, resolve_backend, run_bench
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.gates import KernelVariant, checked
from sfi_core.measure.kernel_bench.settings import KernelSettings
from tests.core.measure.conftest import CPU, built, tiny

pytestmark = pytest.mark.usefixtures("small_buffers")


class FakeClock:
    """A clock that says how long each call took, and in which order they ran; `stop_at` is Ctrl-C."""

    def __init__(self, times=lambda number: 100.0, stop_at=None):
        self.times, self.stop_at = times, stop_at
        self.prepared, self.order = [], []

    def prepare(self, call):
        self.prepared.append(call)
        return len(self.prepared) - 1

    def time(self, calls):
        for number in calls:
            if len(self.order) == self.stop_at:
                raise KeyboardInterrupt
            self.order.append(number)
            yield self.times(number)


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(bench, "clock_for", lambda *_: fake)
    monkeypatch.setattr(bench, "copy_gb_per_s", lambda *_: 10.0)
    monkeypatch.setattr(bench, "floor_us", lambda *_: 1.0)
    return fake


def test_a_sweep_of_a_short_context_leaves_out_what_cannot_be():
    sweep = KernelSettings.for_sweep("retention", ("fast",), context=1024)
    assert sweep.retentions == (0.375, 0.5, 0.75, 0.984, 1.0)
    assert sweep.ops == ("fast",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 7}, "heads must be a multiple of kv_heads, got 7 and 8"),
        ({"retentions": (0.0,)}, "retention must be in (0, 1], got 0.0"),
        ({"retentions": (1.01,)}, "retention must be in (0, 1], got 1.01"),
        ({"retentions": (float("nan"),)}, "retention must be in (0, 1], got nan"),
        ({"retentions": (0.0158,)}, "retention must be at least 0.01593 at a context of 16384"),
        ({"context": 260}, "context must be at least 261 (4 sink, 256 recent and 1 selected token)"),
        ({"ops": ("fsat",)}, "unknown op 'fsat'; did you mean 'fast'? expected one of ('fast', "),
        ({"dtype": "int8"}, "unknown dtype 'int8'; expected one of ('auto', "),
        ({"batch": 0}, "batch must be positive, got 0"),
        ({"repeats": -1}, "repeats must be positive, got -1"),
    ],
)
def test_a_wrong_setting_is_named(changes, words):
    with pytest.raises(ConfigError) as caught:
        KernelSettings(**changes)
    assert str(caught.value).startswith(words)


def test_a_retention_that_no_op_needs_does_not_limit_the_context():
    settings = KernelSettings(ops=("prompt", "append"), context=1024)
    assert settings.forecast_bytes() > 0
    with pytest.raises(ConfigError, match=r"retention must be at least 0\.2549 at a context of 1024"):
        KernelSettings(ops=("prompt", "top_k"), context=1024)


def test_the_backend_follows_the_device():
    assert resolve_backend("auto", CPU) == "torch"
    assert resolve_backend("auto", torch.device("cuda")) == "triton"
    with pytest.raises(BackendError, match="--backend torch"):
        resolve_backend("triton", CPU)
    with pytest.raises(ConfigError, match="unknown backend 'x'"):
        resolve_backend("x", CPU)


def test_bytes_by_op():
    """By hand: B 2, H 2, G 2, D 16, float32, T 150."""
    settings = tiny()
    bytes_of = {variant.name: variant.bytes for variant in built(LayerData(settings, "torch", CPU))}
    kv_row = 2 * 2 * 2 * 16 * 4
    assert settings.attention_bytes(10, gathered=7) == (10 * kv_row + 2 * 2 * 4 * 16 * 4 + 2 * 2 * 7 * 4)
    whole = settings.attention_bytes(150)
    assert settings.attention_bytes(150, evidence=True) == whole + 2 * 2 * 2 * 150 * 4
    ends = 2 * 2 * 4 * 16 * 4
    assert settings.attention_bytes(150, queries=5) == whole + 4 * ends
    assert bytes_of["selector"] == 2 * 150 * (4 * 4 + 2 * 4 + 2 * 4 + 1)
    assert bytes_of["top_k"] == 2 * 2 * (150 + 51) * 4
    assert bytes_of["pack"] == settings.pack_bytes(55) == 2 * 55 * kv_row + 2 * 2 * 55 * 4
    assert bytes_of["append"] == 2 * kv_row + 2 * 2 * 4
    queries, request = 2 * 75 * 4 * 16 * 4, kv_row // 2
    assert bytes_of["prompt.piece"] == 150 * request + queries
    sparse = settings.attention_bytes(10)
    assert settings.attention_bytes(10, dense=1) == sparse + 140 * kv_row // 2
    basis = 2 * 2 * 16 * 17 * 4
    chosen = bytes_of["append"] + 2 * 2 * 150 * 4 + 2 * basis
    assert bytes_of["codescan"] == chosen + settings.attention_bytes(75)
    # 55 rows, 4 of them sinks and 42 on the device: 51 wanted positions, 42 old ones
    assert bytes_of["recall"] == bytes_of["pack"] + 2 * 2 * (51 + 42) * 4


def test_a_run_that_does_not_fit_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(bench, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(bench, "LayerData", None)
    with pytest.raises(MemoryForecastError, match=r"must fit 0\.00 GB .* lower --batch or"):
        run_bench(tiny(), "torch", CPU)


def test_the_rate_of_a_prompt_is_its_operations_by_the_time_beside_its_own_rival(clock):
    rows = {row["op"]: row for row in run_bench(tiny(ops=("prompt",), repeats=1), "torch", CPU).rows()}
    whole = rows["prompt"]
    operations = 4 * 4 * 16 * 150 * 151 / 2
    assert whole["tflop_per_s"] == pytest.approx(operations / whole["median_us"] / 1e6)
    expected = rows["prompt.sdpa"]["median_us"] / whole["median_us"]
    assert whole["speedup_over_sdpa"] == pytest.approx(expected)
    assert whole["speedup_over_dense"] is None
    assert rows["dense"]["tflop_per_s"] is None
    pairs = sum(1 for w in range(75) for t in range(150) if t <= 75 + w)
    piece = rows["prompt.piece"]
    assert piece["tflop_per_s"] == pytest.approx(pairs * 4 * 2 * 2 * 16 / piece["median_us"] / 1e6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_checks_and_times_every_op(dtype):
    rows = run_bench(tiny(dtype=dtype, repeats=2), "torch", CPU).rows()
    assert {row["op"] for row in rows} == {
        "fast", "dense", "dense.sdpa", "verify", "mixed_heads", "selector", "top_k", "pack", "recall",
        "append", "codescan",
        "prompt", "prompt.sdpa", "prompt.piece", "prompt.piece.sdpa",
        "rms_norm", "rotary", "silu_mul", "project", "project.torch",
    }  # fmt: skip
    for row in rows:
        assert row["matches_reference"], (row["op"], row["failure"])
        assert row["median_us"] > 0
        assert row["repeats"] == 2
    fast = next(row for row in rows if row["op"] == "fast")
    assert (fast["attended_tokens"], fast["ideal_speedup"]) == (75, 2.0)
    shapes = {row["op"]: (row["context"], row["batch"], row["form"]) for row in rows}
    assert shapes["prompt"] == (150, 1, "150 queries over 150 tokens")
    assert shapes["prompt.piece"] == (150, 1, "75 queries over 150 tokens")


def test_the_variants_of_a_group_take_turns_and_their_rows_come_before_the_next_group(clock):
    """A slow minute of the machine slows all that is compared; the first rows do not wait for the last op."""
    calls = []
    ops = ("fast", "dense", "verify", "append", "top_k")
    result = run_bench(
        tiny(ops=ops, repeats=3), "torch", CPU, on_group=lambda title, rows: calls.append((title, rows, [*clock.order]))
    )
    assert [title for title, *_ in calls] == [
        "Attention of a step", "Attention of verifications and of mixed heads", "Selection of a slow step", "The cache",
    ]  # fmt: skip
    assert calls[0][2] == [0, 1, 2, 3] * 3  # dense, two of SDPA, fast
    assert clock.order[12:] == [4, 5, 6, 7, 8] * 3 + [9] * 3 + [10] * 3
    assert [row for _, rows, _ in calls for row in rows] == result.rows()
    assert [row["form"] for row in calls[1][1] if row["op"] == "verify"] == [
        "1 query", "5 queries", "9 queries", "16 queries", "17 queries",
    ]  # fmt: skip


def test_rows_are_arithmetic_on_medians(clock):
    settings = tiny(ops=("fast", "dense"), repeats=3)
    clock.times = lambda number: {0: 400.0, 1: 300.0, 2: 250.0, 3: 100.0}[number] + len(clock.order)
    rows = {row["op"]: row for row in run_bench(settings, "torch", CPU).rows()}
    dense, fast = rows["dense"], rows["fast"]
    assert (dense["median_us"], fast["median_us"]) == (405.0, 108.0)
    assert dense["speedup_over_dense"] == 1
    assert fast["speedup_over_dense"] == 405 / 108
    assert fast["speedup_over_sdpa"] == rows["dense.sdpa"]["median_us"] / 108
    assert fast["gb_per_s"] == pytest.approx(fast["bytes"] / 108e-6 / 1e9)
    assert fast["bandwidth_share"] == pytest.approx(fast["gb_per_s"] / 10)


def fake(name: str, error, call=lambda: None) -> KernelVariant:
    return KernelVariant(name, None, call, 1000, error)


def test_variants_that_raise_or_are_wrong_are_named_and_the_others_are_timed(clock, monkeypatch):
    """As a compiler, a launch and a capture do; what is not finite is no number in JSON."""

    def broken():
        raise RuntimeError("ptxas died\nand more")

    def made():
        yield fake("wrong", lambda: 2.0)
        yield fake("right", lambda: 0.5)
        yield fake("raises", broken)
        yield fake("infinite", lambda: float("inf"))
        yield broken()

    monkeypatch.setattr(bench, "groups", lambda _: [("All", checked("unmade", 0.5, made()))])
    result = run_bench(tiny(repeats=3), "torch", CPU)
    rows = {row["op"]: row for row in result.document()["rows"]}
    assert {op: (row["repeats"], row["error_share"], row["failure"]) for op, row in rows.items()} == {
        "right": (3, 0.5, None),
        "wrong": (0, 2.0, "2 times the error that rounding allows"),
        "raises": (0, None, "RuntimeError: ptxas died"),
        "infinite": (0, None, "inf times the error that rounding allows"),
        "unmade": (0, None, "RuntimeError: ptxas died"),
    }
    assert clock.order == [0] * 3
    assert [name.split(" (")[0] for name in result.failures] == [
        "wrong", "raises", "infinite", "unmade at retention 0.5",
    ]  # fmt: skip


def test_a_device_that_is_lost_keeps_the_times_so_far(clock, monkeypatch):
    monkeypatch.setattr(bench, "groups", lambda _: [("All", [fake("one", lambda: 0.0)])])
    times = iter((7.0, 8.0))

    def lost(_):
        for time_us in times:
            return time_us
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    clock.times = lost
    result = run_bench(tiny(repeats=5), "torch", CPU)
    assert [(row["op"], row["repeats"], row["median_us"]) for row in result.rows()] == [("one", 2, 7.5)]
    with pytest.raises(WrongResultError, match=r"got timing \(RuntimeError: CUDA error: an illegal"):
        result.check()


def test_ctrl_c_keeps_the_times_so_far(clock):
    settings = tiny(ops=("fast", "dense"))
    clock.stop_at = 4 + 2
    result = run_bench(settings, "torch", CPU)
    assert result.interrupted
    assert {row["op"]: row["repeats"] for row in result.rows()} == {"dense": 2, "dense.sdpa": 2, "fast": 1}
    clock.order, clock.stop_at = [], 0
    assert run_bench(settings, "torch", CPU).rows() == []


def test_the_document_says_what_was_measured_and_what_was_not():
    document = run_bench(tiny(ops=("dense",), repeats=1), "torch", CPU).document()
    assert set(document) >= {"rows", "compiled", "machine", "versions", "backend", "notes"}
    assert (document["backend"], document["compiled"]) == ("torch", [])
    assert document["machine"]["copy_gb_per_s"] > 0
    assert {"driver", "torch", "triton", "processor"} <= set(document["machine"])
    notes = " ".join(document["notes"])
    took = "dense.sdpa (enable_gqa) ran as flash_attention_for_cpu"
    for missing in ("not the Triton kernels", "paper_like", took):
        assert missing in notes


INTERPRETER_WARNING = "ignore:Conversion of an array with ndim > 0"  # triton 3.6 with numpy 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(INTERPRETER_WARNING)
def test_every_kernel_variant_runs_and_equals_its_formula(kernel_device):
    layer = LayerData(tiny(), "triton", torch.device(kernel_device))
    errors = {(variant.name, variant.form): variant.error() for variant in built(layer)}
    assert {name for name, _ in errors} == {
        "dense", "dense.host", "dense.evidence", "dense.paper_like", "dense.sdpa", "fast", "fast.gather",
        "verify", "mixed_heads", "pack", "recall", "selector", "top_k", "append", "append.host", "codescan",
        "prompt", "prompt.sdpa", "prompt.piece", "prompt.piece.sdpa",
        "rms_norm", "rotary", "rotary.append", "silu_mul", "project", "project.torch",
    }  # fmt: skip
    assert max(errors.values()) <= 1, errors
