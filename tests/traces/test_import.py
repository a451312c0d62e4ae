"""What files of selections become a trace, and which are refused, with the row."""

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from sfi_core.errors import ConfigError, InputError, TraceError
from sfi_traces.health import judge
from sfi_traces.importing import import_trace
from sfi_traces.model.check import check
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.replay import Supports, reuse
from sfi_traces.summary import summarize
from sfi_traces.views.words import text_of
from tests.traces.imports import LAYERS, PROMPT, STEPS, STOP, K, selection_arrays, write_npz
from tests.traces.made import overlap
from tests.traces.small import rows


def imported(path: Path) -> Trace:
    folder = path.with_suffix(".trace")
    import_trace(path, folder)
    return Trace.open(folder)


def sets_of(arrays: dict) -> dict[tuple[int, int], list[int]]:
    return {
        (step, layer): sorted(position for position in row.tolist() if position >= 0)
        for step, layers in enumerate(arrays["positions"])
        for layer, row in enumerate(layers)
    }


def assert_supports_are(trace: Trace, sets: dict[tuple[int, int], list[int]]) -> None:
    supports = {(row["step"], row["layer"]): row for row in rows(trace, "supports")}
    assert {key: row["positions"] for key, row in supports.items()} == sets
    for (step, layer), row in supports.items():
        before = None if step == 0 else overlap(sets[step - 1, layer], sets[step, layer])
        assert row["overlap_previous_step"] == (before and pytest.approx(before))


def test_an_indexer_s_positions_are_supports_and_selections(tmp_path):
    arrays = selection_arrays()
    trace = imported(write_npz(tmp_path / "a.npz"))
    sets = sets_of(arrays)
    assert_supports_are(trace, sets)
    for row in rows(trace, "selections"):
        selection, before = sets[row["step"], row["layer"]], sets.get((row["step"] - 1, row["layer"]), [])
        assert row["positions"] == selection
        assert row["added"] == len(set(selection) - set(before))
        assert row["removed"] == len(set(before) - set(selection))
    assert {row["mass"] for row in rows(trace, "supports")} == {None}
    steps = rows(trace, "steps")
    assert [row["token_id"] for row in steps] == arrays["token_ids"].tolist()
    assert [row["sentence"] for row in steps] == [int(row["token_id"] > STOP) for row in steps]
    assert [row["context_tokens"] for row in steps] == [PROMPT + step for step in range(STEPS)]
    assert steps[-1]["attended_tokens"] == K
    assert [row["token_id"] for row in rows(trace, "prompts")] == arrays["prompt_token_ids"].tolist()
    assert trace.manifest["audit"]["top"] == K


def test_an_imported_trace_is_sound_and_summed_up_without_masses(tmp_path):
    trace = imported(write_npz(tmp_path / "a.npz"))
    assert check(trace)["problems"] == []
    assert check(trace)["steps_checked"]
    summary = summarize(trace)
    assert summary["health"]["findings"] == []
    assert "never_fast" not in {rule["rule"] for rule in summary["health"]["judged"]}
    assert summary["stability"]["within"]["n"] == LAYERS * (STEPS - 2)
    assert summary["audit"] is None
    assert "retained mass, output error, query cosine" in summary["missing"]


def test_an_indexer_that_chooses_the_last_positions_is_told(tmp_path):
    last = [[np.arange(PROMPT + step - K, PROMPT + step)] * LAYERS for step in range(STEPS)]
    trace = imported(write_npz(tmp_path / "a.npz", positions=np.array(last)))
    rules = {finding["rule"] for finding in judge(Request.of(trace))["findings"]}
    assert rules == {"selection_trailing"}
    health = judge(Request.of(trace))
    said = [finding["advice"] for finding in health["findings"]] + [rule["reason"] for rule in health["not_judged"]]
    assert not [words for words in said if "--audit" in words or "trace.positions" in words or "sink=" in words]
    with pytest.raises(TraceError, match="import it with --tokenizer"):
        text_of(Request(trace))


def test_blocks_are_the_positions_that_are_cached(tmp_path):
    blocks = np.full((STEPS, 1, 2, 3), -1)
    blocks[..., 0] = 5  # positions 20 to 23, cached one by one
    blocks[..., 1] = 1
    trace = imported(write_npz(tmp_path / "a.npz", positions=None, blocks=blocks, block_size=4,
                               prompt_token_ids=np.arange(21)))  # fmt: skip
    supports = {(row["step"], row["head"]): row["positions"] for row in rows(trace, "supports")}
    assert supports[0, 0] == supports[0, 1] == [4, 5, 6, 7, 20]
    assert supports[9, 1] == [4, 5, 6, 7, 20, 21, 22, 23]


def test_masses_stay_with_their_positions(tmp_path):
    positions = selection_arrays()["positions"]
    mass = np.full(positions.shape, 0.1)
    mass[..., 2] = 0.3
    path = write_npz(tmp_path / "a.npz", mass=mass)
    row = rows(imported(path), "supports")[-1]
    masses = dict(zip(row["positions"], row["mass"], strict=True))
    assert masses.pop(positions[-1, -1, 2]) == pytest.approx(0.3)
    assert [*masses.values()] == pytest.approx([0.1] * (K - 1))
    assert row["retained_mass"] == pytest.approx(0.1 * (K - 1) + 0.3)
    with pytest.raises(ConfigError, match="top must come with attention, got selections"):
        import_trace(path, tmp_path / "b", top=1)


def changed(at: tuple[int, ...], value: int) -> np.ndarray:
    positions = selection_arrays()["positions"]
    positions[at] = value
    return positions


TWICE = changed((3, 1, 0), selection_arrays()["positions"][3, 1, 5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": changed((3, 1, 0), 23)}, r"positions\[3, 1\].*in 0 to 22, or -1 for padding, got 23"),
        ({"positions": changed((3, 1, 0), -2)}, r"positions\[3, 1\].*or -1 for padding, got -2"),
        ({"positions": TWICE}, r"positions\[3, 1\].*must be different ones, got \d+ twice"),
        ({"positions": changed((3, 1, 0), 1)[:, 0]}, "3 or 4 dimensions, got shape"),
        ({"positions": np.zeros((STEPS, LAYERS, K))}, "must be whole numbers, got float64"),
        ({"positions": None}, "must have positions or blocks, got neither"),
        ({"block_size": 4}, "block_size .* must come with blocks"),
        ({"token_ids": np.arange(5)}, "token_ids .* must be 12, one for each step, got 5"),
        ({"token_ids": None}, "must have token_ids, got none"),
        ({"prompt_token_ids": None}, "must have prompt_token_ids or prompt_tokens, got neither"),
        ({"prompt_tokens": 4}, "prompt_tokens .* must be 20"),
        ({"sfi_import_version": 2}, "has sfi_import_version 2, this sfi reads 1"),
        ({"sfi_import_version": None}, "must have sfi_import_version, got none"),
        ({"sfi_import_version": np.zeros(0)}, r"has sfi_import_version \[\], this sfi reads 1"),
        ({"token_id": np.arange(STEPS)}, "unknown array 'token_id'"),
        ({"layers": np.array([0, 1])}, "layers .* must be 3"),
        ({"layers": np.array([2, 1, 0])}, "must ascend"),
        ({"mass": np.full((STEPS, LAYERS, K), 0.4)}, r"positions\[0, 0\].*add up to 1 at most, got a sum of 1.6"),
        ({"mass": np.zeros((STEPS, K, LAYERS))}, r"mass .* must be \[12, 3, 6\] as positions"),
        ({"token_ids": np.full(STEPS, 2**40)}, "token_ids .* got 1099511627776 at 0"),
        ({"prompt_token_ids": np.array([3, -1])}, "prompt_token_ids .* in 0 to 2147483647, got -1 at 1"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_line_and_leaves_nothing(tmp_path, changes, words):
    path = write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(InputError, match=words) as caught:
        imported(path)
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("attentions", [None, 5, (None, None), ((None,), (None,)), [torch.ones(2), None]])
def test_attention_that_no_eager_model_returned_says_which_does(tmp_path, attentions):
    torch.save({"sfi_import_version": 1, "attentions": attentions}, tmp_path / "a.pt")
    with pytest.raises(InputError, match='attn_implementation="eager"'):
        imported(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_what_is_no_such_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with pytest.raises(InputError, match="must be a file, got none"):
        imported(path)
    path.write_bytes(b"not a file of any kind" * 9)
    with pytest.raises(InputError, match=f"cannot be read as {suffix}"):
        imported(path)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"sfi_import_version": 1, "positions": Path("x")}, tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"cannot be read as \.pt"):
        imported(tmp_path / "a.pt")


def test_a_trace_is_overwritten_with_force_alone_and_by_a_whole_one(tmp_path):
    path = write_npz(tmp_path / "a.npz")
    trace = imported(path)
    with pytest.raises(ConfigError, match="add --force"):
        imported(path)
    with pytest.raises(InputError):
        import_trace(write_npz(tmp_path / "b.npz", positions=TWICE), trace.path, force=True)
    assert check(trace)["sound"]
    import_trace(path, trace.path, force=True)
    assert check(Trace.open(trace.path))["sound"]


def test_reuse_is_the_share_of_a_step_s_own_selection(tmp_path):
    """Every third step selects anew; what it has is held against what the others have."""
    sets = sets_of(selection_arrays())
    (supports,) = Supports.load(imported(write_npz(tmp_path / "a.npz")))
    reasons = ["x" if step % 3 == 0 else "" for step in range(STEPS)]
    report = reuse([supports], [reasons])
    recall, new = {}, {}
    for (step, layer), selection in sets.items():
        if step % 3:
            old, begin = sets[step - step % 3, layer], PROMPT + step - step % 3
            recall[step, layer] = len(set(selection) & set(old)) / len(selection)
            new[step, layer] = len({p for p in selection if p in old or p >= begin}) / len(selection)
    assert (report["runs"], report["reused_steps"], report["saved"]) == (4, 8, pytest.approx(8 / 11))
    assert report["recall"] == pytest.approx(np.mean([*recall.values()]))
    assert report["recall_with_new"] == pytest.approx(np.mean([*new.values()]))
    assert report["recall_with_new"] > report["recall"]
    assert report["worst"]["recall"] == pytest.approx(min(recall.values()))
    assert recall[report["worst"]["step"], report["worst"]["layer"]] == pytest.approx(report["worst"]["recall"])
    for row in report["layers"]:
        recalls = [value for (_, layer), value in recall.items() if layer == row["layer"]]
        assert row["recall"] == pytest.approx(np.mean(recalls))
    assert report["retained_mass"] is None


def run_block(number: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    exec(page.split("```python\n")[number].split("```")[0], {})  # noqa: S102 - the page's own example


def test_the_documented_file_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_block(1)
    trace = imported(tmp_path / "indexer.npz")
    assert len(rows(trace, "steps")) == 64
    assert {len(row["positions"]) for row in rows(trace, "supports")} == {2048}


def test_the_page_s_lines_make_arrays_of_rows(tmp_path, monkeypatch):
    """Of a Parquet file with a row for each step and layer, in any order."""
    monkeypatch.chdir(tmp_path)
    arrays = selection_arrays()
    sets = sets_of(arrays)
    table = [
        {"step": step, "layer": layer, "token_id": int(arrays["token_ids"][step]), "positions": positions}
        for (step, layer), positions in reversed(sets.items())
    ]
    parquet.write_table(pa.Table.from_pylist(table), "rows.parquet")
    with pytest.raises(InputError, match=r"must end in one of .*, got \.parquet; docs/import\.md makes arrays"):
        imported(tmp_path / "rows.parquet")
    run_block(2)
    trace = imported(tmp_path / "indexer.npz")
    assert_supports_are(trace, sets)
    assert [row["token_id"] for row in rows(trace, "steps")] == arrays["token_ids"].tolist()


def test_the_page_s_lines_make_arrays_of_sglang_s_answer(tmp_path, monkeypatch):
    """Base64 of int32, a row for every token but the last, as its `extract_indexer_topk_from_meta_info` reads it."""
    monkeypatch.chdir(tmp_path)
    prompt, ids = list(range(6)), [7, 8, 9, 3]
    place = np.arange(2048, dtype=np.int32)
    seen = place < np.arange(1, len(prompt) + len(ids))[:, None]  # what each token may attend to
    raw = np.broadcast_to(np.where(seen, place, -1)[:, None], (len(seen), 61, 2048)).astype(np.int32)
    answer = {"output_ids": ids, "meta_info": {"indexer_topk": base64.b64encode(raw.tobytes()).decode()}}
    for name, value in (("answer.json", answer), ("prompt.json", prompt)):
        Path(name).write_text(json.dumps(value))
    run_block(4)
    assert_supports_are(
        imported(tmp_path / "indexer.npz"), {(t, layer): list(range(6 + t)) for t in range(4) for layer in range(61)}
    )
