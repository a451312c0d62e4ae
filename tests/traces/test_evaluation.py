"""The folder of an evaluation, what its rows come to, its figure and that of a benchmark."""

import errno
import json
import re
import sys
from importlib.util import find_spec

import pytest

from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_core.measure.evaluation.grid import Cell, Method, at_sizes
from sfi_traces.record.folder import check_new
from sfi_traces.results import paired_difference, summarize, summarize_fidelity, wilson
from sfi_traces.results.plots import plot_bench
from sfi_traces.results.store import KIND, ResultsFolder

MANIFEST = {
    "asked": {"samples": 2}, "model": {"name": "made-up"}, "methods": [], "text": None, "device": "cpu",
    "machine": {}, "versions": {},
}  # fmt: skip


def row(method="sfi", *, size="10%", seed=0, score=1.0, **changes):
    values = {
        "method": method, "policy": method, "preset": "default", "settings": {}, "size": size, "share": 0.1,
        "budget": 20, "recent": 10, "task": "recall", "length": 512, "seed": seed, "prompt_tokens": 500,
        "score": score, "scores": {"token_accuracy": score / 2}, "generated": 9, "finish_reason": "stop",
        "read_ratio": 0.125, "selection_ratio": 0.0625, "stored_ratio": 1.0, "slow_steps": 1, "fast_steps": 3,
        "decode_seconds": 0.5, "tokens_per_second": 18.0, "text": " a", "expected": [" a"], "error": None,
    }  # fmt: skip
    return values | changes


def failed(**changes):
    nothing = dict.fromkeys(
        ("score", "read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps",
         "decode_seconds", "tokens_per_second", "text", "generated", "finish_reason")
    )  # fmt: skip
    return row(**changes) | nothing | {"scores": {}, "error": "no memory"}


def window(method="sfi", *, number=0, kl=(0.0, 0.5, 0.25), **changes):
    steps = {
        "window": [7] * 3, "step": [0, 1, 2], "gone": [0, 0, 1], "slow": [True, True, False],
        "kl": list(kl), "agrees": [True, True, False], "nll": [1.0, 2.0, 3.0], "nll_full": [1.0, 1.5, 2.0],
    }  # fmt: skip
    report = {
        "prompt_tokens": 50, "token_ids": [1, 2, 3], "finish_reason": "length", "slow_steps": 2,
        "fast_steps": 1, "slow_at": [0, 1], "reasons": {"first": 1, "trigger": 1},
        "mean_attended_tokens": 5.0, "read_ratio": 0.5, "selection_ratio": 0.25, "stored_ratio": 1.0,
    }  # fmt: skip
    return {
        "method": method, "policy": method, "preset": "default", "settings": {}, "size": "10%", "share": 0.1,
        "budget": 20, "recent": 10, "length": 50, "tokens": 3, "window": number, "steps": steps,
        "report": report, "error": None,
    } | changes  # fmt: skip


def opened(path, rows=()):
    results = ResultsFolder.create(path, MANIFEST, force=False)
    for sample in rows:
        results.append("samples", sample)
    return results


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_folder_resumed_after_a_torn_line_ends_as_an_uninterrupted_one(tmp_path, cut):
    rows = [row(seed=seed, text=' "é"\n') for seed in range(4)]
    whole = opened(tmp_path / "whole", rows)
    torn = opened(tmp_path / "torn", rows[:3])
    file = torn.path / "samples.jsonl"
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    torn.leave()
    resumed = ResultsFolder.resume(torn.path)
    assert resumed.rows["samples"] == rows[:2]
    resumed.begin()
    for sample in rows[2:]:
        resumed.append("samples", sample)
    assert file.read_bytes() == (whole.path / "samples.jsonl").read_bytes()
    whole.leave()
    assert resumed.rows == whole.rows == ResultsFolder.resume(whole.path).rows


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    results = opened(tmp_path / "results", [row()])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for write in (lambda: results.append("samples", row(seed=1)), results.close):
        with pytest.raises(SfiError, match="results cannot be written: No space left on device"):
            write()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{]", "not valid JSON"),
        (b"\x00" * 30, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"7", "no row of samples"),
        (json.dumps(row(score=1.5)).encode(), r"score must be in \[0, 1\], got 1.5"),
        (json.dumps(row(seed="x")).encode(), "seed must be int, got 'x'"),
        (b'{"method": "sfi"}', "size is missing"),
    ],
)
def test_a_damaged_line_is_named_and_the_other_rows_are_kept(tmp_path, line, fault):
    results = opened(tmp_path / "results", [row()])
    with (results.path / "samples.jsonl").open("ab") as file:
        file.write(line + b"\n" + json.dumps(row(seed=2)).encode() + b"\n")
    results.leave()
    resumed = ResultsFolder.resume(results.path)
    (message,) = resumed.damaged
    assert re.search(rf"samples\.jsonl, line 2: .*{fault}", message)
    assert [sample["seed"] for sample in resumed.rows["samples"]] == [0, 2]
    resumed.begin()
    resumed.append("samples", row(seed=1))
    resumed.leave()
    again = ResultsFolder.resume(results.path)
    assert ([sample["seed"] for sample in again.rows["samples"]], again.damaged) == ([0, 2, 1], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "evaluation",\n"a" 1}', r"manifest\.json, line 2: not valid JSON; evaluate again"),
        ('{"kind": "evaluation"}', "has schema None, this sfi reads 1; evaluate again"),
        ('{"kind": "evaluation", "schema_version": 1}', "must have 'asked', got none"),
    ],
)
def test_a_damaged_manifest_is_one_line(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        ResultsFolder.resume(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_closed_folder_says_that_it_is_finished(tmp_path):
    results = opened(tmp_path / "results", [row(), failed(seed=1)])
    results.close()
    assert json.loads((results.path / "manifest.json").read_text())["finished"]


def test_a_folder_is_never_taken_from_others(tmp_path):
    results = opened(tmp_path / "results", [row()])
    results.close()
    with pytest.raises(ConfigError, match="exists; add --resume to go on with it, --force"):
        check_new(results.path, KIND, force=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text('{"schema_version": 1}')
    for force in (False, True):
        with pytest.raises(ConfigError, match="must be new or empty, got one with other files"):
            check_new(other, KIND, force=force)
    with pytest.raises(ConfigError, match="must be a folder, got a file"):
        check_new(other / "manifest.json", KIND, force=True)


def test_force_replaces_the_results_and_nothing_else(tmp_path):
    results = opened(tmp_path / "results", [row()])
    results.close()
    (results.path / "notes.txt").write_text("mine")
    again = ResultsFolder.create(results.path, MANIFEST, force=True)
    assert again.rows["samples"] == []
    assert sorted(file.name for file in results.path.iterdir()) == [".lock", "manifest.json", "notes.txt"]


def test_the_rows_of_a_closed_folder_are_in_the_order_of_an_uninterrupted_run(tmp_path):
    results = opened(tmp_path / "results", [row(seed=seed) for seed in (2, 0, 3)])
    (method,) = at_sizes([Method.parse("sfi")], shares=[0.1])
    task, length = (row()[name] for name in ("task", "length"))
    results.close(None, [Cell(method=method, length=length, number=seed, task=task) for seed in range(4)])
    assert [sample["seed"] for sample in results.rows["samples"]] == [0, 2, 3]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no record locks")
def test_a_folder_has_one_process_at_a_time(tmp_path):
    results = opened(tmp_path / "results", [row()])
    for take in (
        lambda: ResultsFolder.resume(results.path),
        lambda: ResultsFolder.create(results.path, MANIFEST, force=True),
    ):
        with pytest.raises(ConfigError, match="must be free, got another process on it"):
            take()
    results.close()
    assert ResultsFolder.resume(results.path).rows["samples"] == [row()]


def test_a_summary_is_the_mean_of_its_samples():
    scores, reference = [1.0, 0.0, 1.0], [1.0, 1.0, 0.5]
    rows = [
        sample
        for seed in range(3)
        for sample in (
            row("full-kv", size="all", seed=seed, score=reference[seed], read_ratio=1.0),
            row(seed=seed, score=scores[seed], read_ratio=0.1 * seed),
        )
    ]
    full, sparse = summarize(rows)
    interval, difference = wilson(scores), paired_difference(scores, reference)
    assert (full["score"], full["difference"], full["n"]) == (2.5 / 3, 0.0, 3)
    assert (sparse["score"], sparse["low"], sparse["high"]) == (interval.mean, interval.low, interval.high)
    assert (sparse["difference"], sparse["difference_low"], sparse["difference_high"]) == (
        difference.mean, difference.low, difference.high,
    )  # fmt: skip
    assert sparse["read_ratio"] == pytest.approx(0.1)
    assert sparse["read"] == pytest.approx(0.1 + 0.0625)
    assert sparse["slow_rate"] == 0.25
    assert sparse["scores"] == {"token_accuracy": pytest.approx(1 / 3)}


def test_failures_are_counted_and_in_no_mean():
    (summary,) = summarize([row(score=0.5), failed(seed=1), failed(seed=2)])
    assert (summary["n"], summary["failed"], summary["error"], summary["score"]) == (1, 2, "no memory", 0.5)
    (nothing,) = summarize([failed()])
    assert (nothing["n"], nothing["score"], nothing["low"], nothing["read"]) == (0, None, None, None)


def test_a_difference_is_over_the_samples_that_both_have():
    rows = [row("full-kv", size="all", seed=1, score=0.25), row(seed=0, score=0.0), row(seed=1, score=1.0)]
    assert [summary["difference"] for summary in summarize(rows)] == [0.0, 0.75]
    assert [summary["difference"] for summary in summarize(rows[1:])] == [None]


def test_fidelity_is_over_all_windows_but_for_their_first_steps():
    rows = [window(), window(number=1, kl=(0.0, 0.1, 0.75)), window("quest")]
    rows.append(window(number=2) | {"steps": None, "report": None, "error": "no memory"})
    ours, quest = summarize_fidelity(rows)
    assert ours["kl"] == pytest.approx((0.5 + 0.25 + 0.1 + 0.75) / 4)
    assert (ours["windows"], ours["failed"], ours["error"]) == (2, 1, "no memory")
    assert (ours["agreement"], ours["steps"], ours["slow_rate"]) == (0.5, 4, 0.5)
    assert (ours["read_ratio"], ours["read"], ours["stored_ratio"]) == (0.5, 0.75, 1.0)
    assert quest["method"] == "quest"


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="the plots extra is not installed")
def test_a_figure_has_a_panel_for_each_task_and_length_and_all_methods(tmp_path):
    from sfi_traces.results.plots import plot_evaluation  # noqa: PLC0415 - an extra

    methods = [f"method {index}" for index in range(14)]
    rows = [
        row(method, size=f"{share}%", length=length, read_ratio=share / 100)
        for length in (512, 1024)
        for method in methods
        for share in (5, 10)
    ]
    rows += [row("full-kv", size="all", length=512), failed(length=512, seed=5)]
    path = tmp_path / "plot.svg"
    plot_evaluation({"model": {"name": "made-up"}, "rows": summarize(rows)}, path, kind="svg")
    for words in (*methods, "full-kv", "recall, 512 tokens", "recall, 1,024 tokens"):
        assert f"<!-- {words} -->" in path.read_text()


def point(policy: str, context: int, batch: int, rate: float) -> dict:
    return {
        "policy": policy, "context": context, "batch": batch, "decode_tokens_per_second": rate,
        "decode_tokens_per_second_min": rate - 1, "decode_tokens_per_second_max": rate + 1,
        "repeat_rates": [rate, rate + 1], "slow_rate": None, "roofline_tokens_per_second": 50.0,
        "ragged": False,
    }  # fmt: skip


@pytest.fixture
def document() -> dict:
    return {
        "rows": [
            point(policy, context, batch, 1e4 / context + batch)
            for context in (4096, 8192)
            for batch in (1, 4)
            for policy in ("sfi", "full-kv", "quest", "transformers-static")
        ],
        "skipped": [],
        "notes": ["a note"],
        "model": {"name": "qwen3-0.6b", "dtype": "bfloat16"},
        "machine": {"processor": "a processor", "threads": 2, "copy_gb_per_s": 9.0},
    }


@pytest.fixture
def drawn(monkeypatch) -> list:
    figure = pytest.importorskip("matplotlib.figure")
    saved = []
    save = figure.Figure.savefig

    def kept(self, *arguments, **options):
        saved.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(figure.Figure, "savefig", kept)
    return saved


def test_the_figure_has_a_panel_for_each_batch(tmp_path, document, drawn):
    plot_bench(document, tmp_path / "x.tmp", kind="svg")
    assert (tmp_path / "x.tmp").read_bytes().startswith(b"<?xml")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["batch 1", "batch 4"]
    lines = panels[1].get_lines()
    solid = {line.get_label(): line for line in lines if line.get_linestyle() == "-"}
    assert [*solid] == ["sfi", "full-kv", "quest", "transformers-static"]
    assert [*solid["sfi"].get_xdata()] == [4096, 8192]
    assert [*solid["sfi"].get_ydata()] == [1e4 / 4096 + 4, 1e4 / 8192 + 4]
    dashed = [line for line in lines if line.get_linestyle() == "--"]
    assert [line.get_color() for line in dashed] == [
        solid[policy].get_color() for policy in ("sfi", "full-kv", "quest")
    ]
    assert [*dashed[0].get_ydata()] == [50, 50]
