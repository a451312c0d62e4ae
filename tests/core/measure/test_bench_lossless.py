"""The benchmark's lossless runs: what is counted, what is refused."""

from fractions import Fraction
from statistics import fmean

import pytest
import torch

from sfi_core import EngineOptions, SfiConfig
from sfi_core.errors import ConfigError
from sfi_core.measure.bench import bench as module
from sfi_core.measure.bench.bench import run_bench
from sfi_core.measure.bench.ours import StatedAcceptance, run_ours
from sfi_core.measure.bench.rows import point_rows
from sfi_core.measure.bench.runs import BenchRow, DecodeSample, DecodeVariant, Prompts, Read, variants
from sfi_core.measure.bench.settings import DecodeSettings, Point
from sfi_core.sizes.step import ByteModel
from sfi_core.state.request import RequestState
from tests.architectures import tiny

pytestmark = pytest.mark.usefixtures("small_buffers")

SMALL = SfiConfig(budget=32, recent=16, sink=2)

MODEL = ByteModel(weight_bytes=1000, batch=2, row_bytes=8, heads=2, layers=1)


def settings(**changes) -> DecodeSettings:
    small = {
        "contexts": (128,), "batches": (2,), "steps": 20, "warm_up": 4, "repeats": 1, "config": SMALL,
        "policies": ("sfi", "full-kv"), "slow_rate": Fraction(1, 5), "baselines": (), "acceptance": 1.0,
    }  # fmt: skip
    return DecodeSettings(**{**small, **changes})


def lossless_sample(model, asked, batch=1):
    point = Point(asked.contexts[0], batch, asked.ragged)
    prompts = Prompts.of(asked, point, model.config.vocab_size, model.device)
    (variant,) = (lossless for lossless in variants(asked) if lossless.engine.lossless)
    return run_ours(BenchRow(model, variant, point, asked, prompts, MODEL))


def test_chance_keeps_the_stated_share_and_depends_on_request_and_index_only():
    keeps, state = StatedAcceptance(0.8, seed=3), RequestState(request=1)
    alone = []
    for index in range(2000):
        state.step = index + 1  # of the token after a draft of one
        alone.append(keeps(state, [7], [7, 7]))
    assert fmean(alone) == pytest.approx(0.8, abs=4 * (0.16 / 2000) ** 0.5)
    for first in (0, 17, 400):
        state.step = first + 12
        expected = next(place for place in range(13) if place == 12 or not alone[first + place])
        assert keeps(state, range(12), range(13)) == expected
    assert StatedAcceptance(1.0, 0)(state, range(12), ()) == 12
    assert StatedAcceptance(0.0, 0)(state, range(12), ()) == 0


@pytest.mark.parametrize("acceptance", [1.0, 0.0])
def test_a_stated_acceptance_decides_whatever_random_weights_draft(tiny_model, acceptance):
    """All kept: a pass a token. None kept: each drafted token is a pass too many."""
    asked = settings(acceptance=acceptance)
    sample = lossless_sample(tiny_model, asked)
    found = sample.drafting
    assert sample.tokens >= asked.steps
    assert (found["accepted"] > 0) is (acceptance == 1.0)
    assert found["accepted"] + found["verifications"] == sample.tokens
    assert (sample.steps == sample.tokens) is (acceptance == 1.0)
    # the given tokens decide: at a rate of 1/5 a draft has four tokens at most
    slow = [read[0].slow for read in sample.measured]
    longest = max(len(run) for run in "".join("v" if one else "d" for one in slow).split("v"))
    assert longest <= 4
    assert slow[-1]


def test_rows_count_tokens_and_not_passes():
    """Two requests; the measured passes give 0, 3 and 5 tokens."""
    slow = ((True, True), (False, False), (True, False), (True, True))
    reads = [[Read(first, 100, 40, 20), Read(second, 60, 30, 20)] for first, second in slow]
    sample = DecodeSample(
        2, 1, at=[0, 1, 2, 3, 6], gave=[2, 4, 0, 3, 5], reads=reads,
        drafting={"verifications": 3, "accepted": 5},
    )  # fmt: skip
    variant = DecodeVariant("sfi-lossless", "sfi", EngineOptions(lossless=True), 0.7)
    made = BenchRow(None, variant, Point(100, 2), None, None, MODEL, samples=[sample])
    (row,) = point_rows([made], 1.0)
    assert row["decode_tokens_per_second"] == 8 / 5
    assert row["all_decode_tokens_per_second"] == 12 / 6
    assert (row["steps"], row["tokens_measured"]) == (3, 8)
    assert row["passes_per_token"] == 6 / 8
    assert row["accepted_per_verification"] == 5 / 3
    fast = [500 + 8 * 40, 500 + 8 * 30]
    dense = [500 + 8 * n + 16 * 2 * n + 2 * 8 * 20 for n in (100, 60)]
    assert row["bytes_per_step"] == round((sum(fast) + dense[0] + fast[1] + sum(dense)) / 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": 1.5}, r"acceptance must be in \[0, 1\], got 1.5"),
        ({"policies": ("full-kv", "freekv")}, "policy full-kv cannot draft for a lossless run"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        module.check_run(settings(**changes), torch.device("cpu"))


def test_a_batch_over_sliding_windows_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(module.ours, "run_ours", None)
    with pytest.raises(ConfigError, match="batch must be 1 in lossless runs of a model with sliding"):
        run_bench(tiny("gemma-2"), settings())
