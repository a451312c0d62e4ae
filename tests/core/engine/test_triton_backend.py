"""The whole decoder on the Triton kernels, in the interpreter without a GPU, beside the references."""

from collections import Counter
from functools import cache

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, SfiConfig, slow_fast
from sfi_core.errors import BackendError
from sfi_core.settings.config import DraftConfig, FreeKVConfig, SyncKVConfig
from tests.architectures import BY_LABEL, prompts, tiny
from tests.core.conftest import tiny_qwen3
from tests.covering import case, first
from tests.fakes import RecordingObserver, positions, tokens, use_references

VOCAB, NEW = 96, 4
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 30, 7)]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=8, budget=16, t_max=3,
    trigger_token_ids=tuple(range(2, 96, 5)), window_prefill=4, freekv=FreeKVConfig(page=8),
    synckv=SyncKVConfig(heads="even", stride=3),
)  # fmt: skip
DRAFTED = prompts(9, 70, 24)
DRAFTING = SfiConfig(
    sink=2, recent=6, budget=5, t_max=6, min_gap=0, span=0, window_prefill=8, trigger_token_ids=tuple(range(0, 300, 6))
)
# They select before every step, by bounds and by codes. `recorded` has `sfi`, test_triton_heads.py others.
KINDS_OF_POLICY = ("quest", "codescan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cache
def model():
    return tiny_qwen3().to(DEVICE)


def complete(backend: str, prompts: list[list[int]] = PROMPTS, **options):
    options = {"config": CONFIG, "max_new_tokens": NEW, "stop_token_ids": (), **options}
    settings = {name: options.pop(name) for name in ("prefill_chunk", "graphs") if name in options}
    engine = EngineOptions(backend=backend, **settings)
    return sfi_core.generate(options.pop("model", model()), None, prompts, engine=engine, **options)


@cache
def recorded(backend: str):
    """Complete once for all tests that look at the same run; the requests are slow at different steps."""
    observer = RecordingObserver()
    result = complete(backend, observers=[observer])
    assert len({tuple(request.slow_at) for request in result.report.requests}) > 1
    return result, observer


@pytest.mark.parametrize(
    ("policy", "more"), first([*((policy, {}) for policy in KINDS_OF_POLICY), ("codescan", {"max_batch": 1})])
)
def test_every_policy_gives_the_tokens_of_the_references(policy: str, more, monkeypatch: pytest.MonkeyPatch):
    """A ragged batch whose requests are slow at different steps, or wait; the prompt comes in pieces."""
    monkeypatch.setattr("sfi_kernels.compiled.why_not", lambda: "not asked for")
    options = {"policy": policy, "prefill_chunk": 40, **more}
    prompts = PROMPTS[::2]
    torch_run, triton_run = (complete(name, prompts, **options) for name in ("torch", "triton"))
    assert tokens(triton_run) == tokens(torch_run)
    assert (torch_run.report.backend, triton_run.report.backend) == ("torch", "triton")
    torch_paths, paths = (
        {name: n for name, n in run.report.paths.items() if "graph" not in name} for run in (torch_run, triton_run)
    )
    counted = {name.removeprefix("triton."): n for name, n in paths.items()}
    expected = {name.removeprefix("torch."): n for name, n in torch_paths.items()}
    assert counted == expected
    assert all(name.startswith("triton.") for name in paths)


@pytest.mark.parametrize(
    "change",
    first(
        [
            {"recent_mode": "sliding", "dense_layers": (1,), "span": 3, "slow_start": 2},
            {"page_size": 6, "budget": 15, "sink": 0, "recent": 25},
        ]
    ),
    ids=str,
)
def test_every_setting_gives_the_tokens_of_the_references(change: dict, monkeypatch: pytest.MonkeyPatch):
    use_references(monkeypatch)  # which read numbers on the host: no graphs
    options = {"prompts": PROMPTS[1:], "config": CONFIG.replace(**change), "graphs": False}
    assert tokens(complete("triton", **options)) == tokens(complete("torch", **options))


def test_with_room_for_everything_it_is_full_attention(monkeypatch: pytest.MonkeyPatch):
    use_references(monkeypatch)
    config, prompts = CONFIG.replace(budget=200), PROMPTS[1:2]
    full = complete("torch", prompts, policy="full-kv")
    assert tokens(complete("triton", prompts, config=config)) == tokens(full)


@pytest.mark.exhaustive
def test_a_request_in_a_batch_gets_the_tokens_it_gets_alone():
    together = tokens(recorded("triton")[0])
    assert tokens(complete("triton", PROMPTS[1:2])) == together[1:2]


def test_a_request_that_ended_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch):
    free = tokens(recorded("triton")[0])
    use_references(monkeypatch)
    stop = free[2][1]
    ended = tokens(complete("triton", PROMPTS[1:], stop_token_ids=(stop,)))
    for before, after in zip(free[1:], ended, strict=True):
        cut = before.index(stop) + 1 if stop in before else len(before)
        assert after == before[:cut]


@pytest.mark.seam
@pytest.mark.parametrize("label", first(["gemma-2", "gpt-oss", case("deepseek-v3")]))
def test_other_architectures_give_the_tokens_of_the_references(label: str):
    """Soft caps beside sliding layers; learned sinks; values of another width than keys."""
    other = BY_LABEL[label].build().to(DEVICE)
    both = [complete(name, PROMPTS[1:], model=other) for name in ("torch", "triton")]
    assert tokens(both[1]) == tokens(both[0])


def test_transformers_own_loop_runs_on_the_kernels():
    ids = torch.tensor([PROMPTS[1]], device=DEVICE)
    with slow_fast(model(), None, CONFIG, engine=EngineOptions(backend="triton")) as session:
        out = model().generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert out[0, ids.shape[1] :].tolist() == tokens(complete("torch", [PROMPTS[1]]))[0]
    assert session.report.backend == "triton"


@pytest.mark.parametrize("rows", first([1, 3]))
def test_a_step_of_codescan_launches_five_kernels_a_layer(rows: int):
    """Whatever the batch: three that choose, of which the first appends, the attention and its join."""
    prompt, whole = (
        Counter({kernel.name: kernel.launches for kernel in result.report.kernels})
        for result in (complete("triton", PROMPTS[:rows], policy="codescan", max_new_tokens=n) for n in (1, 3))
    )
    steps, layers = 2, 2
    fused = "rms_norm", "rotary", "silu_mul"  # the model's own, on a GPU
    launches = {name: count for name, count in (whole - prompt).items() if name not in fused}
    a_step = ("code_scan_sums", "code_scan_score", "code_scan_choose", "split_attention", "join_splits")
    assert launches == dict.fromkeys(a_step, steps * layers) | {"split_plan": steps}


def test_the_report_counts_launches():
    result, _ = recorded("triton")
    launches = {kernel.name: kernel.launches for kernel in result.report.kernels}
    assert launches["split_attention"] == 2 * (NEW - 1)
    assert launches["split_plan"] == NEW - 1
    assert launches["append"] == 2 * NEW
    assert recorded("torch")[0].report.kernels == []


def test_slow_and_fast_requests_share_each_launch():
    spans = recorded("triton")[1].spans
    assert ("attention.mixed", 0) in spans
    assert ("attention.mixed", 1) in spans


def test_tokens_and_selections_are_those_of_the_references_with_their_diagnostics():
    assert tokens(recorded("triton")[0]) == tokens(recorded("torch")[0])
    ours, theirs = (
        {(e.step, e.layer, e.request): e for e in recorded(backend)[1].selections} for backend in ("triton", "torch")
    )
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert positions(ours[key].index_HK) == positions(expected.index_HK)
        assert ours[key].diagnostics.keys() == expected.diagnostics.keys()
        for name, value in expected.diagnostics.items():
            torch.testing.assert_close(ours[key].diagnostics[name], value, rtol=1e-4, atol=1e-6)


def test_auto_takes_triton_on_a_gpu_only():
    assert complete("auto", PROMPTS[2:], max_new_tokens=1).report.backend == ("triton" if DEVICE == "cuda" else "torch")


def test_a_head_too_wide_is_refused_with_the_alternative():
    wide = tiny_qwen3()
    wide.config.head_dim = 320
    wide = type(wide)(wide.config).eval().to(DEVICE)
    with pytest.raises(BackendError, match=r"at most 256 .*, got 320; use the torch backend"):
        complete("triton", PROMPTS[2:], model=wide)
    assert complete("auto", PROMPTS[2:], model=wide, max_new_tokens=1).report.backend == "torch"


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's limit")
def test_bfloat16_in_the_interpreter_is_refused():
    half = tiny_qwen3().to(torch.bfloat16)
    with pytest.raises(BackendError, match="bfloat16 comes out wrong in Triton's interpreter"):
        complete("triton", PROMPTS[2:], model=half)


def test_a_page_that_holds_no_whole_tiles_is_refused():
    with pytest.raises(BackendError, match=r"page size must be a multiple of 16 .*, got 24"):
        complete("triton", PROMPTS[2:], page_size=24)


@pytest.mark.seam
@pytest.mark.parametrize(
    ("rows", "policy"),
    [(DRAFTED, "sfi"), (DRAFTED[1:2], "sfi"), (DRAFTED, "codescan"), (DRAFTED, "snapkv")],
    ids=["ragged", "alone", "codescan", "snapkv"],
)
def test_both_backends_draft_and_verify_alike(rows: list[list[int]], policy: str, monkeypatch):
    if DEVICE == "cpu":
        use_references(monkeypatch)
    # more drafts than recent tokens: taken back values were in the sums of codescan
    recent = {"recent": 3} if policy == "codescan" else {}
    config = DRAFTING.replace(draft=DraftConfig(max_tokens=5, adaptive=False), **recent)
    drafter = tiny("qwen3").to(DEVICE)
    runs = [
        sfi_core.generate(
            drafter, None, rows, config, policy=policy, stop_token_ids=(), max_new_tokens=14,
            engine=EngineOptions(backend=backend, lossless=True),
        ).report.requests
        for backend in ("torch", "triton")
    ]  # fmt: skip
    torch_requests, triton_requests = runs
    for name in ("token_ids", "lossless"):
        assert [getattr(ours, name) for ours in triton_requests] == [getattr(theirs, name) for theirs in torch_requests]
    assert max(request.lossless.tested for request in triton_requests) > 0


@pytest.mark.skipif(DEVICE == "cuda", reason="a Hopper GPU chains launches")
@pytest.mark.parametrize(("backend", "message"), [("triton", "needs a CUDA device"), ("torch", "must be false")])
def test_launches_are_chained_on_hopper_or_not_at_all(backend: str, message: str):
    engine = EngineOptions(backend=backend, chained=True)
    with (
        pytest.raises(BackendError, match=f"^engine.chained {message}"),
        slow_fast(model(), engine=engine, config=CONFIG),
    ):
        pass
