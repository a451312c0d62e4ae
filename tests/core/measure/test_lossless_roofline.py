"""Forecasts of lossless runs: how long drafts are, and what their bytes allow."""

import json
from fractions import Fraction

import pytest
import torch

from sfi_core.engine.lossless import best_length
from sfi_core.measure.bench.architectures import empty_model, random_config
from sfi_core.measure.bench.byte_roofline import Expectation, forecast_document
from sfi_core.measure.bench.settings import DecodeSettings, Point
from sfi_core.settings.config import SfiConfig

CPU = torch.device("cpu")
ROW, LAYERS, HEADS, WEIGHTS = 147_456, 36, 8, 8_044_936_192  # Qwen3-4B


@pytest.fixture(scope="module")
def model():
    return empty_model(random_config("qwen3-4b"), torch.device("meta"), torch.bfloat16)


def settings(draft=None, **changes):
    config = SfiConfig.preset("paper").replace(draft=draft or {})
    asked = {
        "contexts": (32768,), "batches": (16,), "policies": ("full-kv", "sfi"), "config": config,
        "lossless": True, "acceptance": 0.9,
    }  # fmt: skip
    return DecodeSettings(**asked | changes)


def rows(model, asked):
    document = forecast_document(model, asked, CPU, bandwidth_gb_per_s=4300, memory_bytes=150e9)
    json.dumps(document)
    return {row["policy"]: row for row in document["rows"]}, document["notes"]


def test_a_row_can_be_recomputed_by_hand(model):
    found, notes = rows(model, settings({"max_tokens": 8, "adaptive": False}))
    assert list(found) == ["full-kv", "sfi", "sfi-lossless"]
    row, length = found["sfi-lossless"], 32768
    fast = WEIGHTS / 16 + ROW * (4 + 2048 + 256)
    slow = WEIGHTS / 16 + ROW * length + 16 * HEADS * LAYERS * length + 2 * ROW * 2052
    again = 1 - 0.9**8
    tokens = sum(0.9**k for k in range(9))
    mean = (8 * fast + (1 + again) * slow) / (tokens + again)
    assert row["bytes_per_step"] == pytest.approx(16 * mean, abs=1)
    assert row["slow_bytes_per_step"] == pytest.approx(16 * slow, abs=1)
    assert row["roofline_tokens_per_second"] == pytest.approx(4.3e12 / mean)
    assert row["roofline_speedup"] == pytest.approx((WEIGHTS / 16 + ROW * length) / mean)
    assert (row["drafts"], row["stated_acceptance"]) == (8, 0.9)
    assert row["tokens_per_verification"] == pytest.approx(tokens)
    assert row["passes_per_token"] == pytest.approx((9 + again) / (tokens + again))
    assert (found["sfi"]["lossless"], found["sfi"]["drafts"]) == (False, None)
    assert "acceptance is stated, 0.9" in notes[-1]


def test_if_all_is_kept_a_lossless_run_reads_what_its_policy_reads(model):
    """The slow steps are the same ones, at every twentieth token."""
    asked = settings({"max_tokens": 40, "adaptive": False}, acceptance=1.0)
    found, _ = rows(model, asked)
    assert found["sfi-lossless"]["drafts"] == 19
    names = ("bytes_per_step", "fast_bytes_per_step", "slow_bytes_per_step", "roofline_speedup")
    for name in names:
        assert found["sfi-lossless"][name] == pytest.approx(found["sfi"][name])


@pytest.mark.parametrize(
    ("draft", "changes", "drafts"),
    [
        ({"adaptive": False}, {}, 16),
        ({"adaptive": False}, {"slow_rate": Fraction(1, 8)}, 7),
        ({"adaptive": False}, {"slow_rate": Fraction(1)}, 0),
    ],
)
def test_a_draft_ends_with_its_most_tokens_or_before_a_stated_slow_step(model, draft, changes, drafts):
    expected = Expectation(model, settings(draft, **changes), CPU)
    assert expected.cycle("sfi", Point(32768, 16)).drafts == drafts


def test_an_adaptive_draft_has_the_engine_s_length_and_depends_on_the_point(model):
    expected = Expectation(model, settings(acceptance=0.8), CPU)
    found = [expected.cycle("sfi", Point(*point)).drafts for point in ((32768, 16), (8192, 1))]
    fast, slow = 502_808_512 + ROW * 2308, 502_808_512 + ROW * 32768 + 4608 * 32768 + 2 * ROW * 2052
    assert found[0] == best_length(0.8, fast / slow, 16)
    assert found[1] == 1 < found[0]
