"""Runs one hostile case: it must end in an answer or in one line, soon, and in little memory."""

import faulthandler
import json
import math
import os
import shutil
import signal
import struct
import tempfile
import zipfile
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from sfi_cli.commands.generate.prompts import read_prompts, token_ids
from sfi_cli.settings import SETTINGS, given
from sfi_core.engine.prompt_cache import FILE, FORMAT, PromptCache
from sfi_core.errors import SfiError
from sfi_core.generation.generate import generate
from sfi_core.hosts.vllm.settings import RequestSettings
from sfi_core.machine.memory import peak_bytes, reset_peak, resident_bytes
from sfi_core.models.load import load_tokenizer
from sfi_core.policies.built_in.synckv import HeadClusters
from sfi_core.settings.config import SfiConfig
from sfi_traces.model.trace import Trace
from sfi_traces.results import summarize
from sfi_traces.results.store import ResultsFolder
from sfi_traces.schema import TABLES
from sfi_traces.views import frames
from tests.architectures import BY_LABEL, SMALL
from tests.cli.trace_commands import sfi
from tests.core.hosts.vllm.scheduling import FakeScheduler
from tests.traces.imports import selection_arrays
from tests.traces.made import make_trace

SECONDS, BYTES = 20, 2 << 30  # of a case: processor time, memory
WAIT = 300  # seconds that a case may take, while others use the processors
SHM = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, where nothing waits for a disk
PLACE = Path(tempfile.mkdtemp(prefix="sfi-fuzz-", dir=SHM if SHM.is_dir() else None))
BASE = make_trace(PLACE / "base", steps=8, policy="sfi")
MANIFEST = json.loads((BASE / "manifest.json").read_text())
COMMANDS = {
    "check": lambda run, out: ["trace", "check", run],
    "diff": lambda run, out: ["trace", "diff", BASE, run, "--json"],
    "export csv": lambda run, out: ["trace", "export", run, "--format", "csv", "-o", out, "-q"],
    "export perfetto": lambda run, out: ["trace", "export", run, "--format", "perfetto", "-o", out, "-q"],
    "heads": lambda run, out: ["tune", "heads", run, "-o", out, "-q"],
    "play": lambda run, out: ["play", run],
    "replay": lambda run, out: ["trace", "replay", run, "--budget", "4,8"],
    "show": lambda run, out: ["trace", "show", run],
    "sql": lambda run, out: ["trace", "sql", run, "FROM steps JOIN supports USING (request, step)", "--format", "csv"],
    "step": lambda run, out: ["trace", "show", run, "--step", 1],
}
SLOW = {  # not in `make test`
    "plot": lambda run, out: ["trace", "plot", run, "-o", out],
    "report": lambda run, out: ["trace", "report", run, "-o", out],
    "tune": lambda run, out: ["tune", run, "--trials", 2, "-o", out, "-q"],
}
LINES = {
    "batch": {"prompt": "One. Two.", "max_new_tokens": 3, "messages": [{"role": "user", "content": "x"}]},
    "samples": {
        "method": "sfi", "size": "10%", "task": "recall", "length": 512, "seed": 0, "policy": "sfi",
        "preset": "default", "settings": {}, "share": 0.1, "error": None, "score": 1.0,
        "scores": {"token_accuracy": 1.0}, "read_ratio": 0.1,
        "selection_ratio": 0.0, "stored_ratio": 1.0, "slow_steps": 1, "fast_steps": 8, "generated": 9,
        "tokens_per_second": 3.0,
    },
    "manifest": {
        "kind": "evaluation", "schema_version": 1, "asked": {}, "methods": [], "text": None, "model": {"name": "m"},
        "device": "cpu", "machine": {}, "versions": {}, "created": "2026", "finished": None, "stopped": None,
    },
}  # fmt: skip
HEADS = {
    "format": 1, "model": "m", "digest": "d", "made_from": {},
    "layers": {
        "0": {"cluster_of": [0, 0, 1], "representatives": [0, 2]},
        "1": {"cluster_of": [0, 1], "representatives": [0, 1]},
    },
}  # fmt: skip
CONFIG_TEXT = json.dumps(SfiConfig().to_dict())
ARRAYS = selection_arrays()


class BrokenError(AssertionError):
    """A case that does not end as it must."""


@contextmanager
def bounded():
    """Fail for a case that takes too long or too much memory."""

    def late(*_: object) -> None:
        raise BrokenError(f"must end in {SECONDS} s of work, and in {WAIT} s")

    before = [signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)]
    faulthandler.dump_traceback_later(2 * WAIT, exit=True)  # a hang inside a library
    signal.alarm(WAIT)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    reset_peak(torch.device("cpu"))
    had = resident_bytes(torch.device("cpu"))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)
    if (took := peak_bytes(torch.device("cpu")) - had) > BYTES:
        raise BrokenError(f"must take {BYTES:,} bytes at most, got {took:,}")


def run(recipe: dict) -> None:
    """Run a case; raises what it must not: any exception but an `SfiError`, or `BrokenError`."""
    work = Path(tempfile.mkdtemp(dir=PLACE))
    try:
        with bounded():
            _RUN[recipe["kind"]](recipe, work)
    except SfiError as error:
        _one_line(str(error))
    finally:
        shutil.rmtree(work)


def _one_line(text: str) -> None:
    if "\n" in text.strip() or len(text) > 3000:
        raise BrokenError(f"must be one line, got {text[:3000]!r}")


def _command(words: list) -> None:
    if words[0] == "play":  # what the player reads, without a terminal
        request = frames.playable(Trace.open(words[1]))
        for step in range(min(4, len(request.steps))):
            for read in (frames.frame, frames.passages, partial(frames.strip, width=80)):
                read(request, step)
        return
    ended = sfi(*words)
    for text in (ended.stdout, ended.stderr):
        if not (words[1] == "sql" or text.replace("\n", "").isprintable()):
            raise BrokenError(f"must print, got {text[:300]!r}")
    if ended.stderr.startswith("error: "):
        _one_line(ended.stderr)


def value(drawn):
    """What stands for a value: brackets without end, a number without end."""
    if drawn == "$deep":
        brackets = []
        for _ in range(900):
            brackets = [brackets]
        return brackets
    return 10**400 if drawn == "$huge" else deepcopy(drawn)  # hypothesis draws one object more than once


def edited(document, edits: list):
    copy = json.loads(json.dumps(document))
    for kind, path, drawn in edits:
        node = {"": copy}
        for key in ("", *path)[:-1]:
            known = key in node if isinstance(node, dict) else _has(node, key)
            node = node[key] if known else {}
        last = ("", *path)[-1]
        if kind == "delete" and (isinstance(node, dict) or _has(node, last)):
            node.pop(last, None) if isinstance(node, dict) else node.pop(last)
        elif kind == "add" and isinstance(node, dict):
            node[str(last) + "x"] = value(drawn)
        elif isinstance(node, dict) or _has(node, last):
            node[last] = value(drawn)
            copy = node[""] if last == "" else copy
    return copy


def _has(node, key) -> bool:
    return isinstance(node, list) and isinstance(key, int) and key < len(node)


def spoiled(path: Path, spoils: list) -> None:
    for kind, where, what in spoils:
        if not path.is_file() or path.is_symlink():
            return
        data = path.read_bytes()
        at = math.floor(where * len(data)) if isinstance(where, float) else 0
        if kind == "cut":
            path.write_bytes(data[:at])
        elif kind == "flip" and data:
            at = min(at, len(data) - 1)
            path.write_bytes(data[:at] + bytes([data[at] ^ what]) + data[at + 1 :])
        elif kind == "before":
            path.write_bytes(where.encode() + data)
        elif kind == "become":
            path.unlink()
            {"fifo": os.mkfifo, "folder": Path.mkdir, "empty": Path.touch, "link": _link}[where](path)


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dumped(document) -> bytes:
    return json.dumps(document).encode()


def table_of(rows: list[dict], schema: pa.Schema | None, edits: list) -> pa.Table:
    """Make a table of rows, with changes; what Arrow refuses to make is left as it was."""
    table = pa.Table.from_pylist(rows, schema)
    for name, (kind, row, drawn) in edits:
        if name not in table.column_names and kind in ("cell", "column", "type"):
            continue
        try:
            table = _changed(table, name, kind, row, value(drawn))
        except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError):
            continue
    return table


def _changed(table: pa.Table, name: str, kind: str, row: int, drawn) -> pa.Table:
    if kind in ("cell", "column", "type"):
        place, column = table.column_names.index(name), table[name]
        values, of = column.to_pylist(), column.type
        if kind == "type":
            of = {
                "string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(),
                "list": pa.list_(pa.int32()), "struct": pa.struct([("x", pa.int32())]),
            }[drawn]  # fmt: skip
            return table.set_column(place, name, pa.nulls(len(table), of) if row else _cast(values, of))
        for at in range(len(values)) if kind == "column" else [row % len(values)] if values else []:
            values[at] = drawn
        return table.set_column(place, name, pa.array(values, of))
    return {
        "drop": lambda: table.slice(row), "double": lambda: pa.concat_tables([table, table]),
        "reverse": lambda: table.take(list(range(len(table)))[::-1]), "empty": lambda: table.slice(0, 0),
        "keep": lambda: table.slice(0, row),
    }[kind]()  # fmt: skip


def _cast(values: list, of: pa.DataType) -> pa.Array:
    if pa.types.is_string(of):
        return pa.array([None if cell is None else str(cell) for cell in values], of)
    return pa.array([cell if isinstance(cell, int | float) else None for cell in values], of)


def _manifest(recipe: dict, work: Path) -> None:
    run_ = work / "run"
    shutil.copytree(BASE, run_)
    file = run_ / "manifest.json"
    if "edits" in recipe:
        file.write_bytes(dumped(edited(MANIFEST, recipe["edits"])))
    spoiled(file, recipe.get("spoils", []))
    _command((COMMANDS | SLOW)[recipe["command"]](run_, work / "out.png"))


def _table(recipe: dict, work: Path) -> None:
    run_, name = work / "run", recipe["table"]
    shutil.copytree(BASE, run_)
    part = run_ / name / "part-00000.parquet"
    (run_ / name).mkdir(exist_ok=True)
    rows = parquet.read_table(part).to_pylist() if part.exists() else [_row(TABLES[name])] * 2
    table = table_of(rows, TABLES[name], recipe.get("edits", []))
    parquet.write_table(table, part, write_statistics=recipe.get("statistics", True))
    spoiled(part, recipe.get("spoils", []))
    _command((COMMANDS | SLOW)[recipe["command"]](run_, work / "out.png"))


def _row(schema: pa.Schema) -> dict:
    empty = {"string": "", "bool": False}
    return {field.name: [] if pa.types.is_list(field.type) else empty.get(str(field.type), 1) for field in schema}


def _lines(recipe: dict, work: Path) -> None:
    name = recipe["file"]
    document = {"heads": HEADS, **LINES}[name]
    data = dumped(edited(document, recipe.get("edits", []))) + b"\n"
    results = work / "results"
    results.mkdir()
    (results / "manifest.json").write_bytes(dumped(LINES["manifest"]))
    file = {"samples": results / "samples.jsonl", "manifest": results / "manifest.json"}.get(
        name, work / f"{name}.json"
    )
    file.write_bytes(data)
    spoiled(
        file, [spoil for spoil in recipe.get("spoils", []) if spoil[1] not in ("fifo", "link")]
    )  # the user names it
    if name == "batch":
        for entry in read_prompts(None, None, file).entries:
            token_ids(entry, _tokenizer(), chat=False)
    elif name == "heads":
        HeadClusters.load(file)
    else:
        folder = ResultsFolder.resume(results)
        try:
            summarize(folder.rows["samples"])
            folder.begin()
            folder.close("stopped")
        finally:
            folder.leave()


def _tokenizer():
    if "tokenizer" not in _KEPT:
        _KEPT["tokenizer"] = load_tokenizer()
    return _KEPT["tokenizer"]


_KEPT = {}


def _config(recipe: dict, work: Path) -> None:
    file = work / "config.toml"
    if "sets" in recipe:
        names = sorted(SETTINGS)
        sets = [f"{names[place % len(names)]}={_toml(value(drawn))}" for place, drawn in recipe["sets"]]
        given("generate", sets=sets)
        return
    values = dict(SETTINGS_PLAIN)
    for path, drawn in recipe.get("file", []):
        values[".".join(map(str, path[:2])) or "x"] = value(drawn)
    file.write_text(
        "".join(f"{name} = {_toml(setting)}\n" for name, setting in values.items()), errors="surrogateescape"
    )
    spoiled(file, [spoil for spoil in recipe.get("spoils", []) if spoil[1] not in ("fifo", "link")])
    given("generate", file=file)


SETTINGS_PLAIN = {"budget": 5, "selector.gamma": 0.0, "triggers": ["."]}


def _toml(drawn) -> str:
    try:
        return json.dumps(drawn).replace("\x7f", "")
    except RecursionError:
        return "[" * 900 + "]" * 900


def _import(recipe: dict, work: Path) -> None:
    file = work / "import.npz"
    for name, shape in _arrays(recipe, file):
        _claim(file, name, shape)
    spoiled(file, recipe.get("spoils", []))
    _command(["trace", "import", file, "-o", work / "trace", "-q"])


def _arrays(recipe: dict, file: Path) -> list[tuple[str, list[int]]]:
    arrays, claims = dict(ARRAYS), []
    for kind, name, drawn in recipe.get("edits", []):
        try:
            if kind == "claim":
                claims.append((name, drawn))
            elif kind == "reshape":
                size = math.prod(drawn)
                arrays[name] = np.zeros(drawn, np.int64) if size <= 2**20 else np.broadcast_to(np.int64(0), drawn)
            elif kind == "type":
                arrays[name] = np.asarray(arrays[name]).astype(drawn)
            elif kind == "drop":
                arrays.pop(name, None)
            else:
                arrays[name] = np.asarray(value(drawn))
        except (ValueError, TypeError, LookupError, OverflowError, MemoryError):
            continue
    small = {name: array for name, array in arrays.items() if np.asarray(array).nbytes <= 1 << 24}
    np.savez(file, **{name: array for name, array in small.items() if "/" not in name})
    return claims


def _claim(file: Path, name: str, shape: list[int]) -> None:
    # another shape in an array's header, over the same bytes
    with zipfile.ZipFile(file) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    data = members.get(f"{name}.npy")
    if data is None:
        return
    (size,) = struct.unpack("<H", data[8:10])
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {tuple(shape)}, }}".encode()
    header = header[: size - 1].ljust(size - 1) + b"\n"
    members[f"{name}.npy"] = data[:10] + header + data[10 + size :]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)


def _request(recipe: dict, work: Path) -> None:
    extra_args = {
        name if name.startswith("sfi.") else f"sfi.{name}": value(drawn) for name, drawn in recipe["settings"].items()
    }
    settings = RequestSettings.of(extra_args, SfiConfig(), lambda _: None)
    if len(settings.error) > 600 or not settings.error.isprintable():
        raise BrokenError(f"must be short and print, got {settings.error[:900]!r}")
    json.loads(json.dumps(settings.error))
    settings.salt("sfi")
    scheduler = FakeScheduler(SfiConfig())
    scheduler.add(
        "a", 12, [5, 3, 5, 3, 5], **{name.removeprefix("sfi."): setting for name, setting in extra_args.items()}
    )
    json.dumps(scheduler.run()["a"].report())


def _cache(recipe: dict, work: Path) -> None:
    model, tensors, metadata = _cached(recipe["label"])
    for kind, place, drawn in recipe.get("edits", []):
        name = sorted(tensors)[place % len(tensors)] if kind != "tell" else place
        if kind == "tell":
            metadata[place] = drawn
        elif kind == "drop" and len(tensors) > 1:
            del tensors[name]
        elif kind == "rename":
            tensors[drawn.encode(errors="replace").decode()] = tensors.pop(name)
        elif kind == "reshape":
            tensors[name] = torch.zeros([size for size in drawn if size < 2**20][:3], dtype=tensors[name].dtype)
        elif kind == "type":
            tensors[name] = torch.zeros(tensors[name].shape, dtype=getattr(torch, drawn))
        elif kind == "fill":
            tensors[name] = torch.full(tensors[name].shape, drawn).to(tensors[name].dtype)
    save_file(tensors, work / FILE, metadata)
    spoiled(work / FILE, recipe.get("spoils", []))
    cache = PromptCache.load(work)
    generate(model, None, [PROMPT], SMALL, policy="sfi", max_new_tokens=2, stop_token_ids=(), cache=cache)


def _cached(label: str):
    """A model, and the tensors and metadata of the cache that it leaves."""
    if label not in _KEPT:
        model, cache = BY_LABEL[label].build(), PromptCache()
        model.sfi_key = label
        generate(model, None, [PROMPT[:40]], SMALL, policy="sfi", max_new_tokens=2, stop_token_ids=(), cache=cache)
        cache.save(PLACE / label)
        _KEPT[label] = model, load_file(PLACE / label / FILE), {"format": FORMAT, "model": cache.model}
    model, tensors, metadata = _KEPT[label]
    return model, dict(tensors), dict(metadata)


CACHED = ["gpt-oss", "qwen3-next"]  # a model with windows, and one with states
PROMPT = list(range(2, 62))
_RUN = {
    "cache": _cache, "manifest": _manifest, "table": _table, "lines": _lines, "config": _config, "import": _import,
    "request": _request,
}  # fmt: skip
