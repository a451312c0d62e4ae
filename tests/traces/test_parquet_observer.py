"""What a recorded run becomes on disk."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.train_bundled import build_tokenizer
from sfi_core.errors import ConfigError
from sfi_core.observers.events import BeginStepEvent, PromptEvent, SelectionEvent
from sfi_traces import ParquetObserver, Trace
from sfi_traces.record import writer
from sfi_traces.record.rows import TokenText
from sfi_traces.replay import RecordedVocabulary
from sfi_traces.schema import TABLES
from tests.traces.made import CONFIG, MODEL, make_trace
from tests.traces.small import rows
from tests.traces.told import AUDIT, Told, run_event, step_event, wait_for

REPOSITORY = Path(__file__).parents[2]


def record(folder, **options) -> Trace:
    with ParquetObserver(folder, **options) as observer:
        Told(observer, 0, 2, 12, seed=1)
    return Trace.open(folder)


def selection(index, **changes) -> SelectionEvent:
    event = {"request": 0, "step": 0, "layer": 0, "index_HK": index, "diagnostics": {}}
    return SelectionEvent(**event | changes)


def files(folder) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_table_says_what_the_observer_was_told(tmp_path):
    """A ragged batch in two pieces of prompt, and a second run whose requests are numbered on."""
    with ParquetObserver(tmp_path / "trace", positions=True) as observer:
        runs = [Told(observer, 0, 2, 12, seed=1), Told(observer, 2, 3, 9, seed=2)]
    trace = Trace.open(tmp_path / "trace")
    for name, schema in TABLES.items():
        if name == "timings":
            continue
        rows = [row for run in runs for row in run.rows[name]]
        expected = pa.Table.from_pylist(rows, schema=schema)
        assert len(rows) > 5
        assert trace.table(name).equals(expected), name
        assert trace.manifest["tables"][name] == len(rows)


def test_the_spans_of_a_run_are_of_its_first_request(tmp_path):
    with ParquetObserver(tmp_path / "trace") as observer:
        for batch in (3, 2, 1):
            observer.on(run_event(batch))
            observer.on(BeginStepEvent(step=0, slow=(), fast=(0,)))
            with observer.span("prefill"):
                pass
    assert Trace.open(tmp_path / "trace").table("timings")["request"].to_pylist() == [0, 3, 5]


def test_the_manifest_has_the_keys_that_readers_know(tmp_path):
    expected = json.loads((make_trace(tmp_path / "made") / "manifest.json").read_text())
    manifest = record(tmp_path / "trace", provenance={"preset": "paper", "seed": 5}).manifest
    assert set(manifest) == {*expected, "seed", "tables"}
    assert (manifest["preset"], manifest["seed"]) == ("paper", 5)
    assert manifest["model"] == MODEL
    assert manifest["audit"] == AUDIT
    assert (manifest["finished"] is not None, manifest["stopped"]) == (True, None)
    assert manifest["created"] <= manifest["finished"]


def test_a_prompt_s_hash_is_that_of_its_token_ids(tmp_path):
    trace = record(tmp_path / "trace")
    for request, prompt in enumerate(trace.manifest["prompts"]):
        ids = [r["token_id"] for r in trace.table("prompts").to_pylist() if r["request"] == request]
        digest = hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()
        assert prompt == {"request": request, "tokens": len(ids), "sha256": digest}


def test_every_part_says_where_it_comes_from(tmp_path):
    trace = record(tmp_path / "trace", provenance={"seed": 5})
    for name in TABLES:
        (part,) = trace.parts(name)
        metadata = parquet.read_metadata(part).metadata
        assert metadata[b"schema_version"] == b"1"
        provenance = json.loads(metadata[b"provenance"])
        assert provenance["seed"] == 5
        assert provenance["model"] == MODEL


def test_positions_are_packed_as_deltas_and_only_strings_have_a_dictionary(tmp_path):
    trace = record(tmp_path / "trace", tokenizer=build_tokenizer(512))
    encodings = {}
    for name in TABLES:
        metadata = parquet.read_metadata(trace.parts(name)[0])
        for column in map(metadata.row_group(0).column, range(metadata.num_columns)):
            encodings[name, column.path_in_schema] = set(column.encodings)
            assert column.compression == "ZSTD"
    for table in ("supports", "selections"):
        assert "DELTA_BINARY_PACKED" in encodings[table, "positions.list.element"]
    assert "BYTE_STREAM_SPLIT" in encodings["supports", "mass.list.element"]
    packed = {key[1] for key, kinds in encodings.items() if "RLE_DICTIONARY" in kinds}
    assert packed == {"token_text", "dense_token_text", "reason", "name", "stream"}


def test_a_table_has_the_schema_s_types_without_arrow_s_help(tmp_path):
    trace = record(tmp_path / "trace")
    for name, schema in TABLES.items():
        stored = parquet.read_table(trace.parts(name)[0], partitioning=None).schema
        assert [field.name for field in stored] == [field.name for field in schema]
        for field in stored:
            wanted = schema.field(field.name).type
            assert field.type == wanted or field.type.value_type == wanted.value_type


def test_texts_join_to_the_prompt(tmp_path):
    tokenizer = build_tokenizer(512)
    text = "The cat sat on the mat.\nIt was a dog! And then?"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with ParquetObserver(tmp_path / "trace", tokenizer=tokenizer) as observer:
        observer.on(run_event(1))
        observer.on(PromptEvent(requests=(0,), ids_BT=ids, count=(ids.shape[1],)))
        observer.on(step_event(token_id=int(ids[0, 2])))
    trace = Trace.open(tmp_path / "trace")
    texts = trace.table("prompts")["token_text"].to_pylist()
    assert "".join(texts) == text
    assert trace.table("steps")["token_text"].to_pylist() == [texts[2]]


def test_a_character_of_several_tokens_comes_with_the_last_of_each_request(tmp_path):
    tokenizer = build_tokenizer(512)
    texts = ["h\u00e9llo \N{FOX FACE}.", "\N{IDEOGRAPHIC FULL STOP} ok"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with ParquetObserver(tmp_path / "trace", tokenizer=tokenizer) as observer:
        observer.on(run_event(2))
        for piece in (ids[0][:2], ids[0][2:]):  # within the accent
            observer.on(PromptEvent(requests=(0,), ids_BT=torch.tensor([piece]), count=(len(piece),)))
        for step in range(max(map(len, ids))):  # requests take turns
            for request in (0, 1):
                if step < len(ids[request]):
                    observer.on(step_event(request=request, step=step, token_id=ids[request][step]))
    trace = Trace.open(tmp_path / "trace")
    assert "".join(trace.table("prompts")["token_text"].to_pylist()) == texts[0]
    for request, text in enumerate(texts):
        pieces = [row["token_text"] for row in rows(trace, "steps", request=request)]
        assert "".join(pieces) == text
        assert "" in pieces
    # the last byte of a full stop is no full stop
    assert RecordedVocabulary.of([trace]).trigger_ids(["."]) == {tokenizer.convert_tokens_to_ids(".")}


def test_broken_characters_are_replaced_and_whole_tokens_stay():
    tokenizer = build_tokenizer(512)
    fox = tokenizer("\N{FOX FACE}", add_special_tokens=False)["input_ids"]
    (mark,) = tokenizer("!", add_special_tokens=False)["input_ids"]
    for ids in ([*fox[:-1], mark, *fox], [fox[-1]] * 9 + [mark], [mark, *fox, *fox, mark]):
        assert "".join(map(TokenText(tokenizer), ids)) == tokenizer.decode(ids)
    assert TokenText(tokenizer).alone(fox[0]) == "\N{REPLACEMENT CHARACTER}"
    assert TokenText(tokenizer).alone(mark) == "!"


def test_sentencepiece_s_leading_spaces_are_kept():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(show_progress=False)
    inner.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = tokenizer("the cat sat")["input_ids"]
    assert tokenizer.decode([ids[-1]])[0] != " "  # what makes it hard
    assert "".join(map(TokenText(tokenizer), ids)) == " the cat sat"


def test_a_redacted_trace_holds_neither_ids_nor_text_nor_hashes(tmp_path):
    tokenizer = build_tokenizer(512)
    whole = record(tmp_path / "whole", tokenizer=tokenizer)
    trace = record(tmp_path / "trace", tokenizer=tokenizer, redact_text=True)
    assert not trace.has("prompts")
    for column in ("token_id", "token_text"):
        assert trace.table("steps")[column].null_count == len(trace.table("steps"))
        assert whole.table("steps")[column].null_count == 0
    redacted = {"token_id", "token_text", "dense_token_id", "dense_token_text"}
    for name in TABLES.keys() - {"prompts", "timings", "steps"}:
        columns = [column for column in TABLES[name].names if column not in redacted]
        assert trace.table(name, columns).equals(whole.table(name, columns))
    hashes = [prompt["sha256"] for prompt in whole.manifest["prompts"]]
    assert trace.manifest["redacted"]
    assert [prompt["sha256"] for prompt in trace.manifest["prompts"]] == [None, None]
    assert [p["tokens"] for p in trace.manifest["prompts"]] == [11, 11]
    for path in files(tmp_path / "trace"):
        assert not any(digest.encode() in path.read_bytes() for digest in hashes)


@pytest.mark.parametrize(
    ("budget", "window", "dense", "asked", "recorded"),
    [
        (16384, None, [], None, True),
        (16385, None, [], None, False),
        (16385, 64, [], None, True),  # a sliding layer selects nothing
        (16385, None, [1], None, True),  # nor does one left dense
        (16385, None, [], True, True),
        (8, None, [], False, False),
    ],
)
def test_positions_are_recorded_while_they_are_few(tmp_path, budget, window, dense, asked, recorded):
    layers = [dict(MODEL["layers"][0]), MODEL["layers"][1] | {"window": window}]
    event = run_event(1, model=MODEL | {"layers": layers}, config=CONFIG | {"budget": budget, "dense_layers": dense})
    with ParquetObserver(tmp_path / "trace", positions=asked) as observer:
        observer.on(event)
        observer.on(selection(torch.tensor([[1, 4]], dtype=torch.int32)))
    trace = Trace.open(tmp_path / "trace")
    (row,) = trace.table("selections").to_pylist()
    assert trace.manifest["positions"] is recorded
    assert row["positions"] == ([1, 4] if recorded else None)
    assert row["selected"] == 2


def test_a_policy_that_selects_nothing_has_no_selections(tmp_path):
    with ParquetObserver(tmp_path / "trace") as observer:
        observer.on(run_event(1))
        observer.on(selection(torch.empty(2, 0, dtype=torch.int32)))
        observer.on(selection(torch.full((2, 3), -1, dtype=torch.int32), layer=1))
    assert not Trace.open(tmp_path / "trace").has("selections")


def test_an_empty_refresh_of_a_selector_has_its_rows(tmp_path):
    empty = torch.full((2, 3), -1, dtype=torch.int32)
    diagnostics = {"lambda_star": torch.tensor([[0.25, 0.5]], dtype=torch.bfloat16)}
    with ParquetObserver(tmp_path / "trace") as observer:
        observer.on(run_event(1))
        for step in (0, 1):
            observer.on(selection(empty, step=step, diagnostics=diagnostics))
    rows = Trace.open(tmp_path / "trace").table("selections").to_pylist()
    assert [row["lambda_star"] for row in rows] == [0.25, 0.5] * 2
    assert {row["overlap_previous"] for row in rows} == {None}  # of nothing with nothing
    assert {(row["selected"], row["added"], row["removed"]) for row in rows} == {(0, 0, 0)}


def test_an_interrupted_run_is_a_whole_trace_that_says_so(tmp_path):
    with contextlib.suppress(KeyboardInterrupt), ParquetObserver(tmp_path / "trace") as observer:
        Told(observer, 0, 2, 12, seed=1)
        raise KeyboardInterrupt
    trace = Trace.open(tmp_path / "trace")
    assert trace.manifest["stopped"] == "interrupted"
    assert trace.manifest["finished"] is not None
    assert len(trace.table("steps")) == trace.manifest["tables"]["steps"] == 18


def test_an_old_trace_stays_until_a_run_takes_its_place(tmp_path):
    record(tmp_path / "trace")
    (tmp_path / "trace" / "figure.png").write_text("mine")
    with ParquetObserver(tmp_path / "trace", force=True):
        pass
    assert len(Trace.open(tmp_path / "trace").table("supports")) > 0
    with ParquetObserver(tmp_path / "trace", force=True) as observer:
        observer.on(run_event())
        observer.on(step_event())
    trace = Trace.open(tmp_path / "trace")
    assert [len(trace.table(name)) for name in ("steps", "supports", "prompts")] == [1, 0, 0]
    assert (tmp_path / "trace" / "figure.png").read_text() == "mine"


def test_a_folder_is_recorded_by_one_at_a_time_and_by_force_neither(tmp_path):
    for force in (False, True):
        with ParquetObserver(tmp_path / "trace", force=force) as observer:
            (tmp_path / "trace" / "steps").mkdir(exist_ok=True)  # a trace that has just begun, without a manifest
            with pytest.raises(ConfigError, match="must be free, got another process on it"):
                ParquetObserver(tmp_path / "trace", force=True)
            observer.on(run_event())
            with pytest.raises(ConfigError, match="must be free, got another process on it"):
                ParquetObserver(tmp_path / "trace", force=True)
    assert not (tmp_path / "trace" / ".lock").exists()


def test_an_old_trace_s_links_are_not_followed(tmp_path):
    mine = record(tmp_path / "mine").path
    there = sorted(mine.rglob("*"))
    record(tmp_path / "trace")
    shutil.rmtree(tmp_path / "trace" / "supports")
    (tmp_path / "trace" / "supports").symlink_to(mine / "steps")
    record(tmp_path / "trace", force=True)
    assert sorted(mine.rglob("*")) == there
    assert not (tmp_path / "trace" / "supports").is_symlink()


@pytest.mark.parametrize("manifest", [None, '{"name": "an extension"}', "{", "[]"])
def test_what_is_no_trace_is_never_overwritten(tmp_path, manifest):
    (tmp_path / "thesis.tex").write_text("mine")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ConfigError, match=r"must be new or empty, got one with other files"):
        ParquetObserver(tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_it_watches_without_a_tokenizer_and_changes_nothing_it_is_shown(tmp_path):
    index = torch.tensor([[3, 5, -1]], dtype=torch.int32)
    ids = torch.tensor([[7, 8]])
    with ParquetObserver(tmp_path / "trace") as observer:
        observer.on(run_event(1))
        observer.on(PromptEvent(requests=(0,), ids_BT=ids, count=(1,)))
        observer.on(selection(index))
    assert index.tolist() == [[3, 5, -1]]
    assert ids.tolist() == [[7, 8]]
    assert Trace.open(tmp_path / "trace").table("prompts")["token_text"].null_count == 1


CHILD = """
import sys, time
from pathlib import Path
from sfi_core.observers.events import BeginStepEvent
from sfi_traces.record import writer
from sfi_traces.record.parquet import ParquetObserver
from tests.traces.small import rows
from tests.traces.told import run_event, step_event

writer.SOONEST = 0.1
observer = ParquetObserver(Path(sys.argv[1]))
observer.on(run_event(1))
for step in range(10**6):
    observer.on(BeginStepEvent(step=step, slow=(), fast=(0,)))
    with observer.span("forward"):
        time.sleep(0.001)
    observer.on(step_event(0, step))
"""


def child(folder) -> subprocess.Popen:
    paths = [REPOSITORY, REPOSITORY / "traces", REPOSITORY / "kernels"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], env=environment)


@pytest.mark.exhaustive
def test_a_killed_run_leaves_a_trace_up_to_its_last_parts(tmp_path):
    folder = tmp_path / "trace"
    process = child(folder)
    try:
        wait_for(lambda: len(list((folder / "steps").glob("part-*.parquet"))) >= 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    trace = Trace.open(folder)
    steps = trace.table("steps")["step"].to_pylist()
    assert trace.manifest["finished"] is None
    assert len(trace.parts("steps")) >= 3
    assert steps == list(range(len(steps)))
    assert {*steps} <= {*trace.table("timings")["step"].to_pylist()}


class OnDevice(torch.Tensor):
    is_cuda = True


def test_tensors_of_several_types_come_back_in_order_and_shape(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(writer, "_pinned", lambda some: torch.cat([t.flatten() for t in some]))
    tensors = [
        torch.arange(6, dtype=torch.int32).view(2, 3).as_subclass(OnDevice),
        torch.tensor([0.5, 0.25], dtype=torch.bfloat16).as_subclass(OnDevice),
        torch.tensor([1, 2]),
        torch.tensor([[7]], dtype=torch.int32).as_subclass(OnDevice),
        torch.empty(2, 0, dtype=torch.int32).as_subclass(OnDevice),
    ]
    batch = writer.Batch([(None, dict(enumerate(tensors)))])
    assert [array.tolist() for array in batch.values()] == [t.tolist() for t in tensors]
    assert batch.nbytes == 24 + 4 + 16 + 4 + writer.EVENT_BYTES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_travel_from_the_device_as_they_are():
    tensors = [
        torch.arange(6, device="cuda", dtype=torch.int32).view(2, 3),
        torch.rand(4, device="cuda"),
        torch.tensor([1, 2]),
        torch.tensor([True, False], device="cuda"),
        torch.empty(2, 0, device="cuda", dtype=torch.int32),
    ]
    expected = [tensor.tolist() for tensor in tensors]
    with torch.cuda.stream(torch.cuda.Stream()):
        busy, done = torch.rand(8192, 8192, device="cuda"), torch.cuda.Event()
        for _ in range(100):
            busy = busy @ busy
        done.record()
        batch = writer.Batch([(None, dict(enumerate(tensors)))])
        waiting = not done.query()
    assert [array.tolist() for array in batch.values()] == expected
    assert waiting  # it came back before the device was there
