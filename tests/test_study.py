"""The study behind docs/evidence.md: its texts, what it resumes, its statistics, a tiny run of each part."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import scipy.stats
import torch

from benchmarks.study import texts
from benchmarks.study.bootstrap import estimate
from benchmarks.study.command import main
from benchmarks.study.fidelity import ByLayer
from benchmarks.study.front import READS, interpolated
from benchmarks.study.measured import COLUMNS, KL, TOTAL
from benchmarks.study.sentences import by_lag, gaps, retained, shuffled
from benchmarks.study.supports import RECENT, SINK, Recorder, Shared
from sfi_core.observers.events import AuditEvent
from sfi_core.policies import POLICIES
from sfi_traces.overlap import Overlap

METHODS = """
[front]
shares = [0.1]
recent = 32
methods = ["all=sfi:budget=400", "streaming-llm"]

[apart]
shares = [0.1]
recent = 32
methods = ["sfi", "best=best-at-slow-steps", "each=selector-at-every-step"]

[ablation]
shares = [0.1]
recent = 32
methods = ["sfi", "short=sfi:span=0"]

[granularity]
shares = [0.1, 0.2]
recent = 32
methods = ["sfi", "pages=sfi:page_size=16"]

[fresh]
shares = [0.1]
recent = 32
methods = ["sfi", "heads=fresh-heads-0.9", "half=fresh-half"]

[lossless]
shares = [0.2]
recent = 32
methods = ["sfi", "codescan"]

[ahead]
shares = [0.2]
recent = 32
methods = ["codescan=codescan:recent=8", "ahead=codescan:recent=8,codescan.ahead=half"]

[tasks]
shares = [0.2]
recent = 32
methods = ["full-kv", "sfi"]
"""
WINDOW = ("--kinds", "prose", "--halves", "held", "--lengths", "240", "--tokens", "6")


@pytest.fixture
def study(tmp_path, capsys):
    """Run a part on the bundled checkpoint; return its rows."""
    (tmp_path / "methods.toml").write_text(METHODS)
    common = ["--methods", str(tmp_path / "methods.toml"), "--out", str(tmp_path)]

    def run(part, *options):
        with patch.dict(POLICIES):  # the study's own policies are gone afterwards
            code = main("", [part, "--model", "bundled", *common, *options])
        assert code == 0, capsys.readouterr()
        path = tmp_path / f"{part}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if "at" not in row]

    return run


@pytest.mark.parametrize("kind", ["prose", "code", "lists", "dialogue", "repository", "manual"])
def test_no_document_is_in_both_halves(kind):
    dev, held = texts.text(kind, "dev"), texts.text(kind, "held")
    documents = texts.SOURCES[kind]()
    assert sum(document in dev for document in documents) > len(documents) / 4
    assert not [document for document in documents if document in dev and document in held]


@pytest.mark.parametrize(("count", "kinds"), [(8, 1), (30, 1), (8, 8)])
def test_the_interval_is_scipy_s(count, kinds):
    sample = np.random.default_rng(count).gamma(2, size=count)
    interval = estimate({f"kind {kind}": sample[kind::kinds, None] for kind in range(kinds)})
    expected = scipy.stats.bootstrap(
        [sample], np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    assert interval.value == pytest.approx(sample.mean())
    assert (interval.low, interval.high) == pytest.approx(tuple(expected), abs=0.1 * np.ptp(expected))


def test_between_shares_log_kl_is_linear_in_log_reads():
    points = np.zeros((3, len(COLUMNS)))
    points[:, TOTAL] = 0.05, 0.2, 0.4
    points[:, KL] = points[:, TOTAL] ** -2.0
    assert interpolated(points.ravel()) == pytest.approx([reads**-2.0 for reads in READS])
    points[:, TOTAL] += 0.06  # the least is now 0.11
    assert np.isnan(interpolated(points.ravel())).tolist() == [True, False, False]


def test_supports_share_what_sets_of_positions_share():
    steps, heads, prompt, size = 5, 2, SINK + RECENT + 40, 6
    seen, generator, near = Recorder(), torch.Generator().manual_seed(0), torch.zeros(heads)
    for step in range(steps):
        mass_HT = torch.rand(heads, prompt, generator=generator).softmax(-1)
        index_HK = torch.arange(prompt, dtype=torch.int32).expand(heads, -1)
        nothing_H = torch.zeros(heads)
        event = AuditEvent(
            request=0, step=step, layer=3, slow=True, heads=(0, 1), index_HK=index_HK, mass_HK=mass_HT,
            retained_H=nothing_H, query_cosine_H=nothing_H, output_error_H=nothing_H,
        )  # fmt: skip
        seen.on(event)
        near += (mass_HT[:, :SINK].sum(1) + mass_HT[:, prompt + step + 1 - RECENT :].sum(1)) / steps
    assert seen.local(prompt) == [pytest.approx(near.tolist())]
    shared = Shared.of(seen, prompt, size)
    mass_HNC = torch.from_numpy(seen.mass(3, prompt))
    index_HNK = mass_HNC.topk(size).indices.sort(-1).values.numpy()
    for a in range(steps):
        for b in range(steps):
            expected = Overlap.of(index_HNK[:, a], index_HNK[:, b]).coefficient
            assert shared.overlap_UNN[:, a, b] == pytest.approx(expected)
            held = [mass_HNC[h, a, index_HNK[h, b]].sum().item() for h in range(heads)]
            assert shared.mass_UNN[:, a, b] == pytest.approx(held)
    assert shared.chance == size / 40


def test_an_audit_sums_up_what_fast_steps_read():
    seen = ByLayer(2)
    for step, (slow, read) in enumerate([(True, 0), (False, 1), (False, 3)]):
        index_HK, heads = torch.tensor([[0, 4, 5, 9], [1, 2, -1, -1]], dtype=torch.int32), torch.ones(2)
        event = AuditEvent(
            request=1, step=step, layer=3, slow=slow, heads=(0, 1), index_HK=index_HK, mass_HK=0.1 * (index_HK >= 0),
            retained_H=heads * 0.3 * read, query_cosine_H=heads, output_error_H=heads / (1 + read),
            read_HK=(torch.arange(4) < read).expand(2, -1),
        )  # fmt: skip
        seen.on(event)
    recall = ((1 / 4 + 1 / 2) / 2 + (3 / 4 + 2 / 2) / 2) / 2
    expected = {"recall": [recall], "retained": [0.6], "output_error": [0.375]}
    none, some = seen.means()
    assert none == {}
    assert some == {name: pytest.approx(values) for name, values in expected.items()}


def test_places_tell_a_boundary_from_the_steps_within():
    place_N = np.array([5, 6, 0, 1, 2, 3, 0, 1, 2, 3, 4])
    begin_N = np.arange(len(place_N)) - place_N
    overlap_NN = np.where(begin_N[:, None] == begin_N, 0.9, 0.4).astype(np.float32)
    assert by_lag(overlap_NN, place_N)["same"][:3] == pytest.approx([0.9, 0.9, 0.9])
    assert by_lag(overlap_NN, place_N)["across"][:3] == pytest.approx([0.4, 0.4, 0.4])
    assert gaps(overlap_NN, place_N)[:3] == pytest.approx([0.5, 0, 0.5], abs=1e-6)
    shared = Shared(overlap_NN[None], overlap_NN[None], 0.1)
    shares = retained(shared, place_N)
    assert shares["boundary"][1] == pytest.approx(1)
    assert shares["any"][1] == pytest.approx(np.mean([1] * 8 + [0.4 / 0.9] * 2))
    others = [shuffled(place_N, np.random.default_rng(seed)) for seed in range(8)]
    assert all(sorted(other_N) == sorted(place_N) for other_N in others)
    assert {tuple(np.flatnonzero(other_N == 0)) for other_N in others} == {(2, 6), (2, 7)}


@pytest.mark.exhaustive
def test_every_part_runs_and_is_reported(study, tmp_path):
    for table in ("apart", "ablation", "granularity"):
        study("fidelity", *WINDOW, "--windows", "2", "--table", table)
    rows = study("fidelity", *WINDOW, "--windows", "1", "--table", "fresh")
    kl = {row["method"]: sum(row["kl"]) for row in rows if row["method"].startswith(("sfi", "fresh")) and "kl" in row}
    assert kl["fresh-half"] < kl["sfi"], "what is chosen anew is closer"
    rows = study("fidelity", *WINDOW, "--windows", "2", "--audit", "1")
    assert all(0 < share <= 1 for row in rows if row.get("recall") for share in (*row["recall"], *row["retained"]))
    study("fidelity", *WINDOW, "--windows", "1", "--table", "ahead", "--audit", "1", "--modules")
    shutil.copy(tmp_path / "fidelity.jsonl", tmp_path / "ahead.jsonl")
    lossless = study("lossless", *WINDOW, "--windows", "1")
    assert all(row["same"] and row["accepted"] <= row["tested"] <= row["drafted"] for row in lossless[1:])
    stability = study("stability", *WINDOW, "--lengths", "420", "--windows", "1")
    assert {(row["mode"], row["size"]) for row in stability} == {
        (mode, size) for mode in ("forced", "free") for size in (64, 256)
    }
    tasks = study("tasks", "--tasks", "bundled-recall-1", "--halves", "held", "--lengths", "400", "--windows", "1")
    assert [row["score"] for row in tasks] == [1, 1]
    study("report", "--docs", str(tmp_path / "docs"))
    pages = {path.name: path.read_text() for path in (tmp_path / "docs").glob("*.md")}
    assert set(pages) == {
        "front-240.md", "ahead-240.md", "apart-240.md", "ablation-240.md", "granularity-240.md", "lossless.md",
        "stability.md", "tasks.md",
    }  # fmt: skip
    assert all(f"| {label} | " in pages["apart-240.md"] for label in ("best", "each"))
    assert "| short | " in pages["ablation-240.md"]
    recalled = [line.split(" | ") for line in pages["ahead-240.md"].splitlines() if line.startswith("| ahead | 20 % |")]
    assert len(recalled) == 2, "the KL beside the base's, and what was read"
    assert "| codescan | 20 % | 1 of 1 |" in pages["lossless.md"]
    assert pages["granularity-240.md"].count("| pages | ") == 2, "at each share, and at equal reads"
    assert "| bundled-recall-1 | 400 | sfi | 20 % | 100 (21 to 100) |" in pages["tasks.md"]
    assert len(list(Path(tmp_path / "docs").glob("*.png"))) == 5
