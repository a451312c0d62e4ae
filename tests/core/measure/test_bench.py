"""The decoding benchmark: what it forces, in which order it runs, and what its rows say."""

import statistics
from fractions import Fraction
from functools import partial

import pytest
import torch

from sfi_core import EngineOptions, SfiConfig
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.measure.bench import bench
from sfi_core.measure.bench import ours as our_runs
from sfi_core.measure.bench import runs as running
from sfi_core.measure.bench import theirs as their_runs
from sfi_core.measure.bench.bench import run_bench
from sfi_core.measure.bench.ours import StatedAcceptance, run_ours
from sfi_core.measure.bench.rows import point_rows, step_bytes
from sfi_core.measure.bench.settings import BASELINES, DecodeSettings, Point
from sfi_core.measure.bench.theirs import run_theirs
from sfi_core.sizes.step import ByteModel
from sfi_core.state.request import RequestState
from tests.architectures import tiny

pytestmark = pytest.mark.usefixtures("small_buffers")

SMALL = SfiConfig(budget=32, recent=16, sink=2)


def settings(**changes) -> DecodeSettings:
    small = {
        "contexts": (128,), "batches": (2,), "steps": 10, "warm_up": 4, "repeats": 2, "config": SMALL,
        "slow_rate": Fraction(1, 5), "policies": ("sfi", "full-kv"),
    }  # fmt: skip
    return DecodeSettings(**{**small, **changes})


def byte_model(**changes):
    return ByteModel(**{"weight_bytes": 1000, "batch": 2, "row_bytes": 8, "heads": 2, "layers": 1} | changes)


def row_of(model, variant, asked, batch=2):
    point = Point(asked.contexts[0], batch, asked.ragged)
    prompts = running.Prompts.of(asked, point, model.config.vocab_size, model.device)
    return running.BenchRow(model, variant, point, asked, prompts, byte_model())


def ours(model, asked, *, policy="sfi", batch=2):
    return run_ours(row_of(model, running.DecodeVariant(policy, policy), asked, batch))


@pytest.mark.parametrize(
    ("rate", "row", "batch", "expected"),
    [
        (Fraction(1, 5), 0, 1, [0, 5, 10]), (Fraction(1, 5), 1, 2, [2, 7, 12]), (Fraction(1, 8), 3, 4, [6, 14]),
        (Fraction(2, 5), 0, 1, [0, 2, 5, 7, 10, 12]), (Fraction(0), 0, 1, []), (Fraction(1), 1, 2, list(range(15))),
    ],
)  # fmt: skip
def test_slow_steps_are_evenly_apart_and_staggered(rate, row, batch, expected):
    assert running.slow_steps(rate, row, batch, 15) == expected


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_forced_tokens_make_exactly_the_stated_steps_slow(tiny_model, delay):
    asked = settings(steps=20, config=SMALL.replace(trigger_delay=delay, t_max=2, min_gap=9))
    sample = ours(tiny_model, asked)
    slow = [[t for t, read in enumerate(sample.measured) if read[row].slow] for row in (0, 1)]
    assert slow == [[0, 5, 10, 15], [2, 7, 12, 17]]
    assert sample.slow_rate == 0.2
    warm = [running.kind_of(read) for read in sample.reads[:4]]
    assert warm == [*["fast"] * delay, "slow", "mixed", "fast", "fast"][:4]


def test_step_t_has_the_contexts_and_t_more_tokens(tiny_model):
    asked = settings(contexts=(101,), ragged=True, steps=5)
    sample = ours(tiny_model, asked, batch=3)
    lengths = [[read.length for read in reads] for reads in sample.reads]
    assert lengths[:2] == [[102, 77, 51], [103, 78, 52]]
    theirs = run_theirs(row_of(tiny_model, running.DecodeVariant(BASELINES[0]), asked, batch=3))
    assert [[read.length for read in reads] for reads in theirs.reads] == lengths
    assert len(theirs.at) == len(sample.at) == 1 + 4 + 5


@pytest.mark.parametrize("name", BASELINES)
def test_transformers_decodes_from_the_same_keys_as_ours(tiny_model, name, monkeypatch):
    """Its caches are filled with what ours holds, so that full attention gives the same tokens."""
    row = row_of(tiny_model, running.DecodeVariant(name), settings(contexts=(1500,), steps=6))
    seen = {}
    update = tiny_model.generate

    def generate(ids, **options):
        seen["cache"] = options[CACHE_NAME]
        return update(ids, **options)

    monkeypatch.setattr(tiny_model, "generate", generate)
    run_theirs(row)
    monkeypatch.undo()
    row.variant = running.DecodeVariant("full-kv", "full-kv")
    run_ours(row)
    pages = row.prompts.made_up.store.layers
    for layer, held in enumerate(seen["cache"].layers):
        torch.testing.assert_close(held.keys[:, :, :1499], pages[layer].key_PHND[:, :, :1499])
        torch.testing.assert_close(held.values[:, :, :1499], pages[layer].value_PHNE[:, :, :1499])


def test_a_time_limit_ends_a_run_after_three_steps_or_a_whole_period(tiny_model):
    asked = settings(steps=12, time_limit=1e-9)
    assert ours(tiny_model, asked, policy="full-kv").steps == 3
    triggered = ours(tiny_model, asked)
    assert (triggered.steps, triggered.slow_rate) == (5, 0.2)
    theirs = run_theirs(row_of(tiny_model, running.DecodeVariant(BASELINES[0]), asked))
    # transformers asks whether to stop before it hands the step's tokens over
    assert (theirs.steps, theirs.warm_up, len(theirs.at)) == (4, 1, 6)


@pytest.mark.exhaustive
def test_all_variants_take_their_turn_in_every_repeat(tiny_model, monkeypatch):
    order = []

    def note(original):
        def wrapped(row):
            order.append(row.variant.name)
            return original(row)

        return wrapped

    monkeypatch.setattr(our_runs, "run_ours", note(run_ours))
    monkeypatch.setattr(their_runs, "run_theirs", note(run_theirs))
    result = run_bench(tiny_model, settings(steps=5))
    turn = ["sfi", "full-kv", *BASELINES]
    assert order == turn * 2
    assert [row["policy"] for row in result.rows] == turn
    assert {row["repeats"] for row in result.rows} == {2}


def sample(at, kinds, *, warm_up=1, batch=2):
    slow = {"fast": (False, False), "mixed": (True, False), "slow": (True, True)}
    reads = [
        [running.Read(slow[kind][0], 100, 40, 20), running.Read(slow[kind][1], 60, 30, 20)] for kind in ["fast", *kinds]
    ]
    return running.DecodeSample(batch, warm_up, at=at, reads=reads)


def test_a_hiccup_does_not_count_in_a_run_s_speed():
    """Steps of 1 and 9 seconds among fast ones of 2, a slow one of 5; two requests."""
    run = sample([0, 1, 2, 4, 13, 18, 20], ["fast", "fast", "fast", "slow", "fast"])
    assert run.decode_rate == 2 * 5 / (4 * 2 + 5)


def test_rows_can_be_recomputed_by_hand():
    point, (full, sfi) = Point(100, 2), (running.DecodeVariant(policy, policy) for policy in ("full-kv", "sfi"))
    runs = {
        sfi: [sample([0, 5, 6, 7, 10], ["fast", "mixed", "slow"]), sample([0, 1, 2, 3, 4], ["fast", "mixed", "slow"])],
        full: [sample([0, 2, 4, 6, 8], ["slow"] * 3)],
        running.DecodeVariant(BASELINES[0]): [sample([0, 4, 8, 12, 16], ["slow"] * 3)],
        running.DecodeVariant(BASELINES[1]): [sample([0, 3, 6, 9, 12], ["slow"] * 3)],
    }
    bench_rows = [
        running.BenchRow(None, variant, point, None, None, byte_model(), samples=samples)
        for variant, samples in runs.items()
    ]
    rows = {row["policy"]: row for row in point_rows(bench_rows, copy_gb_per_s=1e-6)}
    row = rows["sfi"]
    assert row["repeat_rates"] == [6 / 5, 6 / 3]
    assert row["decode_tokens_per_second"] == 1.6
    assert row["all_decode_tokens_per_second"] == statistics.median([8 / 10, 8 / 4])
    assert (row["decode_tokens_per_second_q1"], row["decode_tokens_per_second_max"]) == (1.4, 2.0)
    assert row["slow_rate"] == 0.5
    assert (row["fast_steps"], row["mixed_steps"], row["slow_steps"]) == (2, 2, 2)
    assert (row["slow_p50_ms"], row["fast_p99_ms"]) == (2000, 1000)
    fast = [500 + 8 * 40, 500 + 8 * 30]
    slow = [500 + 8 * n + 16 * 2 * n + 2 * 8 * 20 for n in (100, 60)]
    needed = (sum(fast) + slow[0] + fast[1] + sum(slow)) / 3
    assert row["bytes_per_step"] == round(needed)
    assert row["dense_bytes_per_step"] == 1000 + 8 * 160
    assert row["roofline_speedup"] == pytest.approx(2280 / needed)
    assert row["roofline_tokens_per_second"] == pytest.approx(1e3 * 2 / needed)
    assert row["gb_per_s"] == pytest.approx(needed * 0.8 / 1e9)
    assert row["bandwidth_share"] == pytest.approx(row["gb_per_s"] / 1e-6)
    assert row["speedup"] == 1.6 / 1.0
    assert row["roofline_share"] == pytest.approx(1.6 / row["roofline_speedup"])
    assert row["speedup_over_transformers"] == pytest.approx(1.6 / (2 / 3))
    assert rows["full-kv"]["roofline_speedup"] == 1
    assert rows["full-kv"]["bytes_per_step"] == 2280
    assert rows[BASELINES[0]]["slow_rate"] is None


def test_a_slow_request_that_selects_nothing_reads_what_dense_attention_reads():
    read = [running.Read(True, 100, 40, 20)]
    model = byte_model(batch=1)
    assert step_bytes(model, read, selects=False) == model.dense(100)
    assert step_bytes(model, read, selects=True) == model.slow(100, 20)


def test_measured_bytes_are_the_byte_models(tiny_model):
    """2 layers of 2 KV heads of 8 numbers in float32: 256 bytes a token."""
    result = run_bench(tiny_model, settings(baselines=(), repeats=1, steps=5))
    rows = {row["policy"]: row for row in result.rows}
    weights = result.about["weight_bytes"]
    lengths = [128 + t for t in range(5, 10)]
    assert rows["full-kv"]["bytes_per_step"] == weights + 2 * 256 * statistics.fmean(lengths)
    # budget 32, sink 2, recents of 16 that have grown since the last slow step; one slow step each in five
    assert rows["sfi"]["slow_rate"] == 0.2
    asked = settings(baselines=(), repeats=1, steps=5)
    reads = ours(tiny_model, asked).measured
    model = ByteModel.of({**result.about, "weight_bytes": weights}, batch=2)
    mean = statistics.fmean(step_bytes(model, read, selects=True) for read in reads)
    assert rows["sfi"]["bytes_per_step"] == round(mean)
    assert {read.packed for step in reads for read in step} == {34}
    assert reads[0][0].fast_tokens == 34 + 16


@pytest.mark.exhaustive
def test_what_does_not_fit_is_a_row_of_its_own_with_the_batch_that_fits(tiny_model, monkeypatch):
    monkeypatch.setattr(our_runs, "needed_bytes", lambda model, variant, point, *_: 100 * point.batch)
    monkeypatch.setattr(their_runs, "needed_bytes", lambda model, name, point, _: 1000 * point.batch)
    monkeypatch.setattr(bench, "free_bytes", lambda _: 5500)
    result = run_bench(tiny_model, settings(batches=(2, 8), repeats=1, steps=5))
    assert [(row["batch"], row["policy"]) for row in result.rows] == [
        *((2, name) for name in ("sfi", "full-kv", *BASELINES)),
        *((8, name) for name in ("sfi", "full-kv")),
    ]
    assert result.skipped == [
        {"policy": name, "context": 128, "batch": 8, "needed_bytes": 8000, "free_bytes": 5500, "largest_batch": 5}
        for name in BASELINES
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ("sfl",)}, "unknown policy 'sfl'"),
        ({"policies": (), "baselines": ()}, "policy must name at least one"),
        ({"baselines": ("vllm",)}, "unknown baseline 'vllm'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"warm_up": 0}, r"warm_up must be at least trigger_delay \(1\), got 0"),
        ({"time_limit": 0.0}, "time_limit must be positive"),
        ({"slow_rate": Fraction(3, 2)}, r"slow_rate must be in \[0, 1\], got 1.5"),
        ({"contexts": (0,)}, r"contexts must be at least 2, got \(0,\)"),
        ({"contexts": (1,)}, "contexts must be at least 2"),
        ({"batches": ()}, r"batches must be at least 1, got \(\)"),
        ({"acceptance": 1.5}, r"acceptance must be in \[0, 1\], got 1.5"),
        ({"acceptance": 1.0, "policies": ("full-kv", "freekv")}, "policy full-kv cannot draft for a lossless run"),
    ],
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        bench.check_run(settings(**changes), torch.device("cpu"))


lossless = partial(settings, steps=20, repeats=1, baselines=(), acceptance=1.0)


def test_chance_keeps_the_stated_share_and_depends_on_request_and_index_only():
    keeps, state = StatedAcceptance(0.8, seed=3), RequestState(request=1)
    alone = []
    for index in range(2000):
        state.step = index + 1  # of the token after a draft of one
        alone.append(keeps(state, [7], [7, 7]))
    assert statistics.fmean(alone) == pytest.approx(0.8, abs=4 * (0.16 / 2000) ** 0.5)
    for first in (0, 17, 400):
        state.step = first + 12
        expected = next(place for place in range(13) if place == 12 or not alone[first + place])
        assert keeps(state, range(12), range(13)) == expected
    assert StatedAcceptance(1.0, 0)(state, range(12), ()) == 12
    assert StatedAcceptance(0.0, 0)(state, range(12), ()) == 0


@pytest.mark.parametrize("acceptance", [1.0, 0.0])
def test_a_stated_acceptance_decides_whatever_random_weights_draft(tiny_model, acceptance):
    """All kept: a pass a token. None kept: each drafted token is a pass too many."""
    asked = lossless(acceptance=acceptance)
    (variant,) = (way for way in running.variants(asked) if way.engine.lossless)
    sample = run_ours(row_of(tiny_model, variant, asked, 1))
    drafting = sample.drafting
    assert sample.tokens >= asked.steps
    assert (drafting["accepted"] > 0) is (acceptance == 1.0)
    assert drafting["accepted"] + drafting["verifications"] == sample.tokens
    assert (sample.steps == sample.tokens) is (acceptance == 1.0)
    # the given tokens decide: at a rate of 1/5 a draft has four tokens at most
    slow = [read[0].slow for read in sample.measured]
    longest = max(len(run) for run in "".join("v" if is_slow else "d" for is_slow in slow).split("v"))
    assert longest <= 4
    assert slow[-1]


def test_rows_count_tokens_and_not_passes():
    """Two requests; the measured passes give 0, 3 and 5 tokens."""
    slow = ((True, True), (False, False), (True, False), (True, True))
    reads = [[running.Read(first, 100, 40, 20), running.Read(second, 60, 30, 20)] for first, second in slow]
    sample = running.DecodeSample(
        2, 1, at=[0, 1, 2, 3, 6], gave=[2, 4, 0, 3, 5], reads=reads,
        drafting={"verifications": 3, "accepted": 5},
    )  # fmt: skip
    variant = running.DecodeVariant("sfi-lossless", "sfi", EngineOptions(lossless=True), 0.7)
    bench_row = running.BenchRow(None, variant, Point(100, 2), None, None, byte_model(), samples=[sample])
    (row,) = point_rows([bench_row], 1.0)
    assert row["decode_tokens_per_second"] == 8 / 5
    assert row["all_decode_tokens_per_second"] == 12 / 6
    assert (row["steps"], row["tokens_measured"]) == (3, 8)
    assert row["passes_per_token"] == 6 / 8
    assert row["accepted_per_verification"] == 5 / 3
    fast = [500 + 8 * 40, 500 + 8 * 30]
    dense = [500 + 8 * n + 16 * 2 * n + 2 * 8 * 20 for n in (100, 60)]
    assert row["bytes_per_step"] == round((sum(fast) + dense[0] + fast[1] + sum(dense)) / 4)


def test_a_batch_over_states_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(our_runs, "run_ours", None)
    with pytest.raises(ConfigError, match="batch must be 1 in lossless runs of a model with states"):
        run_bench(tiny("granite-4"), lossless())
