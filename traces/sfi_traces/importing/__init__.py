"""Turns a file of selections or attention into a trace (docs/import.md); null stands for what the file lacks."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from sfi_core.errors import ConfigError
from sfi_core.machine.files import KEPT, writing
from sfi_core.observers.events import RunEvent
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import AuditConfig
from sfi_core.triggers.trigger import build_trigger_set
from sfi_traces.importing.arrays import VERSION, open_arrays
from sfi_traces.importing.attention import AttentionArrays
from sfi_traces.importing.selections import SelectionArrays
from sfi_traces.overlap import Array, Ints, SelectedSets
from sfi_traces.record.folder import Lists, PartFiles, TableBuffer, claim, clear, describe_run, now, write_manifest
from sfi_traces.record.rows import TokenText
from sfi_traces.schema import TABLES

POLICY = "imported"
UNNAMED = "unnamed"  # one name, so that sfi trace diff compares files without a model's name
REASON = "imported"  # of every step, since all are slow
PART_BYTES = 64 << 20
Progress = Callable[[int, int], None]  # steps read, of how many
Source = SelectionArrays | AttentionArrays


def import_trace(
    path: Path,
    folder: Path,
    *,
    top: int | None = None,
    tokenizer: Any = None,
    force: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> dict[str, Any]:
    """Write a file as a trace, whole or not at all, and return the trace's manifest.

    Args:
        path: The file; docs/import.md describes its contents.
        folder: Where the trace goes.
        top: Keep so many positions of each row of attention, the most probable; None keeps 1,024.
        tokenizer: Gives the tokens' text, and T_trig where the file has none.
        force: Whether to overwrite a trace.
        progress: Gets the number of steps read, and of all steps.

    Raises:
        InputError: The file contradicts docs/import.md; names the row.
        ConfigError: The folder may not be overwritten, or an option does not fit the file.
        SfiError: The trace cannot be written.
    """
    with open_arrays(path) as arrays:
        source: Source
        if arrays.passes:
            source = AttentionArrays(arrays, top)
        elif top is None:
            source = SelectionArrays(arrays)
        else:
            raise ConfigError("top must come with attention, got selections")
        trigger_ids = source.tokens.triggers
        if trigger_ids is None:
            known = tokenizer is not None
            trigger_ids = build_trigger_set(tokenizer, SfiConfig().triggers).token_ids if known else ()
        manifest = _describe(path, source, trigger_ids, tokenizer)
        with _new_trace(folder, force=force) as work:
            _write(source, work, manifest, tokenizer, progress)
    return manifest


@contextmanager
def _new_trace(folder: Path, *, force: bool) -> Iterator[Path]:
    # a folder beside `folder`; its files move there once the block has ended well
    fresh = not folder.exists()
    lock, whole = claim(folder, force=force), folder.resolve()  # "." has no name
    work: Path | None = None
    try:
        with writing(f"trace folder {folder}"):
            work = Path(mkdtemp(".tmp", f".{whole.name[:KEPT]}.", whole.parent))
            yield work
            clear(folder)
            for piece in sorted(work.iterdir()):
                piece.replace(folder / piece.name)
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        lock.release()
        if fresh:
            with suppress(OSError):  # not empty: the trace is there
                folder.rmdir()


def _describe(path: Path, source: Source, triggers: tuple[int, ...], tokenizer: Any) -> dict[str, Any]:
    # nothing is known of the other program's memory: these settings leave it empty
    config = SfiConfig().replace(sink=0, recent=1, recent_mode="sliding")
    heads = Counter(layer for layer, _ in source.place_U)
    unknown = dict.fromkeys(("key_width", "value_width", "itemsize", "window"))
    model = {  # as `describe_model`; widths and bytes are unknown
        "name": source.tokens.model or UNNAMED,
        "architecture": POLICY,
        "layers": [{"layer": layer, "heads": count, **unknown} for layer, count in heads.items()],
        "query_heads": source.query_heads,
        **dict.fromkeys(("model_type", "dtype", "weight_bytes", "embedding_bytes", "max_positions")),
        "vocabulary": None if tokenizer is None else len(tokenizer),
    }
    given: dict[str, Any] = {"trigger_token_ids": triggers, "model": model, "audit": AuditConfig().to_dict()}
    event = RunEvent(batch=1, requests=1, policy=POLICY, backend="", device="", config=config.to_dict(), **given)
    facts = {name: getattr(source, name) for name in ("kind", "masses", "block_size")}
    imported = {"file": path.name, "version": VERSION, **facts}
    ids = source.tokens.prompt_ids
    sha256 = None if ids is None else hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    prompt = {"request": 0, "tokens": source.tokens.prompt_tokens, "sha256": sha256}
    described = describe_run(event, {"imported": imported}, positions=True, redacted=False)
    return described | {"backend": None, "device": None, "prompts": [prompt]}


def _write(source: Source, folder: Path, manifest: dict[str, Any], tokenizer: Any, progress: Progress) -> None:
    parts, total = PartFiles(folder, manifest), len(source.tokens.token_ids)
    tables = {name: TableBuffer(schema) for name, schema in TABLES.items()}
    layer_U, head_U = np.array(source.place_U).T
    units, sets, top = np.arange(len(layer_U)), SelectedSets(len(layer_U)), 1
    attended: list[float] = []

    def add(table: str, rows: int, columns: dict[str, Any]) -> None:
        tables[table].add_columns(rows, {**dict.fromkeys(TABLES[table].names), "request": 0, **columns})

    for number, step in enumerate(source.steps()):
        change = sets.replace(units, step.index_UK)
        known_UK = step.index_UK >= 0
        key = {"step": number, "layer": layer_U, "head": head_U, "positions": Lists.of(step.index_UK, known_UK)}
        of_support = {
            "mass": None if step.mass_UK is None else Lists.of(step.mass_UK, known_UK),
            "retained_mass": step.retained_U,
            "overlap_previous_step": change["overlap_previous"],
            "overlap_last_refresh": change["overlap_previous"],  # every step refreshed
        }
        add("supports", len(units), key | of_support)
        if source.kind == "selections":
            add("selections", len(units), key | change | {"reason": ""})
        attended.append(step.attended_tokens)
        top = max(top, int(change["selected"].max()))
        if sum(table.nbytes for table in tables.values()) >= PART_BYTES:
            parts.flush(tables)
        progress(number + 1, total)
    text = None if tokenizer is None else TokenText(tokenizer)
    ids = source.tokens.prompt_ids
    if ids is not None:
        prompt = {"position": np.arange(len(ids)), "token_id": ids, "token_text": _texts(text, ids)}
        add("prompts", len(ids), prompt)
    token_N, attended_N = source.tokens.token_ids, np.array(attended)
    step_N, context_N = np.arange(total), source.tokens.prompt_tokens + np.arange(total)
    trigger_N = np.isin(token_N, manifest["trigger_token_ids"])
    texts = _texts(text, token_N)
    of_token = {
        "token_id": token_N,
        "token_text": texts,
        "trigger": trigger_N,
        "sentence": trigger_N.cumsum() - trigger_N,
    }
    place = {"step": step_N, "batch_step": step_N, "position": context_N - 1, "context_tokens": context_N}
    reads = {"attended_tokens": attended_N, "read_ratio": attended_N / context_N}
    alike = {"slow": True, "reason": REASON, "steps_since_slow": 0, "audited": True, "drafted": False}
    add("steps", total, of_token | place | reads | alike)
    parts.flush(tables)
    manifest["audit"]["top"] = manifest["config"]["budget"] = top
    manifest |= {"finished": now(), "tables": parts.written}
    write_manifest(folder, manifest)


def _texts(text: TokenText | None, ids: Ints) -> Array | None:
    return None if text is None else np.array(list(map(text.another(), ids.tolist())), object)
