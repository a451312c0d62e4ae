"""Tables of part `fidelity`: the front of methods, and single changes."""

from collections.abc import Sequence

import numpy as np

from benchmarks.study.bootstrap import Array, Estimate, estimate, estimates
from benchmarks.study.markdown import table
from benchmarks.study.measured import COLUMNS, KL, TOTAL, Measured, Which, name_of, reads_column

READS = (0.1, 0.15, 0.25)  # total reads that methods are compared at
PLACES = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32+")


def by_share(data: Measured, methods: Sequence[tuple[str, str]], shares: Sequence[float]) -> str:
    """Write a row a method and share: KL, total reads, disagreement, slow steps, added loss."""
    most = max((data.count(which) for which in data.windows), default=0)
    rows = []
    for label, method in methods:
        for share in shares:
            values = data.by_kind((method, share))
            if not values:
                continue
            kl, reads, differ, slow, nll, p95, _ = estimates(values)
            rows.append([
                label, f"{100 * share:g} %", kl.text(), p95.text(2), f"{100 * reads.value:.1f} %",
                f"{100 * slow.value:.0f} %", differ.text(3, 100), nll.text(2),
                f"{data.count((method, share))} of {most}",
            ])  # fmt: skip
    heads = [
        "method", "share", "KL, nats", "95th percentile", "total reads", "slow steps", "other token, %",
        "added loss, nats", "windows",
    ]  # fmt: skip
    return table(heads, rows)


def by_kind(data: Measured, methods: Sequence[tuple[str, str]], share: float, kinds: Sequence[str]) -> str:
    """Write a row a method: KL on each kind of text, and total reads."""
    rows = []
    for label, method in methods:
        values = data.by_kind((method, share))
        if values:
            cells = [
                f"{estimate({kind: values[kind]}).text()} at {100 * values[kind][:, TOTAL].mean():.0f} %"
                if kind in values
                else "-"
                for kind in kinds
            ]
            rows.append([label, *cells])
    return table(["method", *kinds], rows)


def at_reads(data: Measured, methods: Sequence[tuple[str, str]]) -> str:
    """Write a row a method: KL at equal total reads, between the shares that were measured.

    Between two shares log KL is linear in log reads; outside of them there is no number.
    """
    rows = []
    for label, method in methods:
        shares = data.shares(method)
        curve = reads_estimates(data, method, shares)
        if curve:
            rows.append([name_of(label, method), *(kl.text() for kl in curve)])
    return table(["method", *(f"{100 * reads:g} % read" for reads in READS)], rows)


def reads_estimates(data: Measured, method: str, shares: Sequence[float]) -> list[Estimate]:
    """Return a method's KL at `READS`, from its shares; empty with fewer than two shares."""
    values = data.by_kind(*((method, share) for share in shares)) if len(shares) > 1 else {}
    column = reads_column(method)
    return estimates(values, lambda mean: interpolated(mean, column)) if values else []


def interpolated(mean: Array, reads: int = TOTAL) -> Array:
    """Return KL at `READS` of [..., shares * COLUMNS]: [..., READS]; `reads` is the column of the reads."""
    points = mean.reshape(*mean.shape[:-1], -1, len(COLUMNS))
    flat = points.reshape(-1, *points.shape[-2:])
    log_kl = np.array([_at(np.log(curve[:, reads]), np.log(curve[:, KL] + 1e-9)) for curve in flat])
    kl: Array = np.exp(log_kl).reshape(*mean.shape[:-1], len(READS))
    return kl


def against(data: Measured, methods: Sequence[tuple[str, str]], first: str, shares: Sequence[float]) -> str:
    """Write a row a method: KL as a multiple of the first one's on the same windows, and total reads."""
    rows = []
    for label, method in methods:
        cells = []
        for share in shares:
            pair: tuple[Which, Which] = ((method, share), (first, share))
            values = data.by_kind(*pair)
            if values:
                ratio = estimate(values, lambda mean: mean[..., 0] / mean[..., len(COLUMNS)])
                kl, reads, _, slow, *_ = estimates(values)
                cells += [kl.text(), ratio.text(3), f"{100 * reads.value:.1f} %", f"{100 * slow.value:.0f} %"]
            else:
                cells += ["-"] * 4
        if set(cells) != {"-"}:
            rows.append([label, *cells])
    heads = ["method"]
    for share in shares:
        heads += [f"KL at {100 * share:g} %", "times the first's", "total reads", "slow steps"]
    return table(heads, rows)


def _at(log_reads: Array, log_kl: Array) -> Array:
    order = np.argsort(log_reads)
    wanted = np.log(READS)
    outside = np.nan
    return np.interp(wanted, log_reads[order], log_kl[order], left=outside, right=outside)
