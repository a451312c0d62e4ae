"""Rows of the benchmark, made from samples."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from sfi_core.measure.bench.runs import KINDS, BenchRow, DecodeSample, DecodeVariant, Read, kind_of
from sfi_core.measure.bench.settings import BASELINES
from sfi_core.policies import policy_class
from sfi_core.sizes.step import ByteModel

PERCENTILES = (50, 95, 99)


def point_rows(measured: Sequence[BenchRow], copy_gb_per_s: float) -> list[dict[str, Any]]:
    """Return a document's row for each row with samples, and its speed-ups over full-kv and transformers."""
    rows = [{**_row(row), **_bytes(row, copy_gb_per_s)} for row in measured if row.samples]
    rates = {row["policy"]: row["decode_tokens_per_second"] for row in rows}
    theirs = max((rates[name] for name in BASELINES if name in rates), default=None)
    full = rates.get("full-kv")
    for row in rows:
        rate = row["decode_tokens_per_second"]
        row["speedup"] = None if full is None else rate / full
        row["speedup_over_transformers"] = None if theirs is None else rate / theirs
        row["roofline_share"] = None if full is None else row["speedup"] / row["roofline_speedup"]
    return rows


def pays_from(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the measured context from which on each other policy beats full-kv, None for none, by batch."""
    speedups: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["speedup"] is not None and row["policy"] not in ("full-kv", *BASELINES):
            speedups.setdefault((row["batch"], row["policy"]), []).append((row["context"], row["speedup"]))
    result = []
    for (batch, policy), measured in sorted(speedups.items(), key=lambda item: item[0][0]):
        falling = sorted(measured, reverse=True)
        paying = [context for context, _ in takewhile(lambda place: place[1] > 1, falling)]
        least = paying[-1] if paying else None
        result.append({"policy": policy, "batch": batch, "context": least, "longest_context": falling[0][0]})
    return result


def _row(row: BenchRow) -> dict[str, Any]:
    variant, point, runs = row.variant, row.point, row.samples
    rates = [run.decode_rate for run in runs]
    return {
        "policy": variant.name,
        "context": point.context,
        "batch": point.batch,
        "ragged": point.ragged,
        "decode_tokens_per_second": statistics.median(rates),
        "decode_tokens_per_second_q1": float(np.percentile(rates, 25)),
        "decode_tokens_per_second_q3": float(np.percentile(rates, 75)),
        "decode_tokens_per_second_min": min(rates),
        "decode_tokens_per_second_max": max(rates),
        "repeat_rates": rates,
        "all_decode_tokens_per_second": statistics.median(run.all_decode_rate for run in runs),
        "repeats": len(runs),
        "steps": min(run.steps for run in runs),
        "warm_up": min(run.warm_up for run in runs),
        "tokens_measured": sum(run.tokens for run in runs),
        "stopped_early": any(run.stopped for run in runs),
        "slow_rate": statistics.fmean(run.slow_rate for run in runs) if variant.policy else None,
        **_drafting(variant, runs),
        **_latencies(runs),
        "peak_memory_bytes": max(run.peak_bytes for run in runs),
        "forecast_memory_bytes": runs[0].forecast_bytes,
        **_tiers(variant, runs),
        **_paths(runs),
    }


def _drafting(variant: DecodeVariant, runs: Sequence[DecodeSample]) -> dict[str, Any]:
    # None for runs that are not lossless
    counts = [run.drafting for run in runs if run.drafting is not None]
    verified, accepted = (sum(count[name] for count in counts) for name in ("verifications", "accepted"))
    passes, tokens = sum(run.batch * run.steps for run in runs), sum(run.tokens for run in runs)
    return {
        "lossless": variant.engine.lossless,
        "stated_acceptance": variant.acceptance,
        "accepted_per_verification": accepted / verified if verified else None,
        "passes_per_token": passes / tokens if counts and tokens else None,
    }


def _paths(runs: Sequence[DecodeSample]) -> dict[str, Any]:
    # over all runs and their warm-up; and why steps were not replayed as graphs, or not compiled, although those are on
    reports = [run.report for run in runs if run.report is not None]
    reasons = {name: [getattr(report, name) for report in reports] for name in ("not_replayed", "not_compiled")}
    paths = sum((Counter(report.paths) for report in reports), Counter[str]())
    return {"paths": dict(paths), **{name: next(filter(None, why), None) for name, why in reasons.items()}}


def _tiers(variant: DecodeVariant, runs: Sequence[DecodeSample]) -> dict[str, Any]:
    # over all decoding steps and the warm-up; None if the whole cache lies on the device
    tiers = [run.report.kv_tiers for run in runs if run.report is not None and run.report.kv_tiers is not None]
    recalled = [tier.recalled_bytes_per_step for tier in tiers]
    return {
        "kv_device_budget": variant.engine.kv_device_budget,
        "kv_device_bytes": max((tier.device_bytes for tier in tiers), default=None),
        "kv_host_bytes": max((tier.host_bytes for tier in tiers), default=None),
        "recalled_bytes_per_step": round(statistics.fmean(recalled)) if recalled else None,
    }


def _latencies(runs: Sequence[DecodeSample]) -> dict[str, Any]:
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for run in runs:
        for reads, seconds in zip(run.measured, run.step_seconds, strict=True):
            times[kind_of(reads)].append(1e3 * seconds)
    row: dict[str, Any] = {}
    for kind, times_ms in times.items():
        row[f"{kind}_steps"] = len(times_ms)
        values = np.percentile(times_ms, PERCENTILES).tolist() if times_ms else [None] * 3
        row |= {f"{kind}_p{at}_ms": value for at, value in zip(PERCENTILES, values, strict=True)}
    return row


def _bytes(row: BenchRow, copy_gb_per_s: float) -> dict[str, Any]:
    policy, runs, model = row.variant.policy, row.samples, row.bytes_read
    selects = bool(policy) and policy_class(policy).refreshes()
    steps = [reads for run in runs for reads in run.measured]
    # a mean over all layers, those left dense included
    selecting = sum(run.selecting for run in runs) * (model.row_bytes + model.dense_row_bytes)
    # tokens per request: the steps, or in a lossless run what its passes gave
    rounds = sum(run.tokens for run in runs) / runs[0].batch
    needed = (sum(step_bytes(model, reads, selects=selects) for reads in steps) + selecting) / rounds
    dense = statistics.fmean(sum(float(model.dense(read.length)) for read in reads) for reads in steps)
    rate = statistics.median(run.decode_rate for run in runs)
    gb_per_s = needed * rate / runs[0].batch / 1e9
    return {
        "bytes_per_step": round(needed),
        "dense_bytes_per_step": round(dense),
        "gb_per_s": gb_per_s,
        "bandwidth_share": gb_per_s / copy_gb_per_s,
        "roofline_tokens_per_second": copy_gb_per_s * 1e9 * runs[0].batch / needed,
        "roofline_speedup": dense / needed,
    }


def step_bytes(model: ByteModel, reads: Sequence[Read], *, selects: bool) -> float:
    """Return the bytes that a step of a batch must read; `selects` says whether slow requests select."""
    total = 0.0
    for slow, length, tokens, packed in reads:
        if not slow:
            total += float(model.fast(length, tokens))
        else:
            total += float(model.slow(length, packed) if selects else model.dense(length))
    return total
