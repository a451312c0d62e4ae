"""Turns a file of selections or attention into a trace; null stands for what the file does not say."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from sfi_core.errors import SfiError
from sfi_core.machine.files import KEPT
from sfi_core.observers.events import RunEvent
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import AuditConfig
from sfi_core.triggers.trigger import build_trigger_set
from sfi_traces.importing.arrays import VERSION, Header, ImportedStep, open_arrays
from sfi_traces.importing.attention import AttentionArrays, has_attention
from sfi_traces.importing.selections import SelectionArrays
from sfi_traces.overlap import SelectedSets
from sfi_traces.record.folder import (
    Lists,
    PartFiles,
    TableBuffer,
    claim,
    clear,
    describe_run,
    file_metadata,
    now,
    write_manifest,
)
from sfi_traces.record.token_text import TokenText
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
    kv_heads: int | None = None,
    tokenizer: Any = None,
    triggers: Sequence[str] = SfiConfig().triggers,
    force: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> dict[str, Any]:
    """Write a file as a trace, whole or not at all, and return the trace's manifest.

    Args:
        path: The file; docs/import.md describes its contents.
        folder: Where the trace goes.
        top: Keep so many positions of each selection, the most probable; None keeps all of a selection, and
            1,024 of an attention tensor.
        kv_heads: KV heads, for each of which an attention tensor's query heads are averaged; None takes the file's
            number, or else each query head by itself.
        tokenizer: Gives the tokens' text and T_trig where the file has none.
        triggers: Trigger strings, for the tokenizer.
        force: Whether to overwrite a trace.
        progress: Gets the number of steps read, and of all steps.

    Raises:
        InputError: The file contradicts docs/import.md; names the row.
        ConfigError: The folder may not be overwritten, or an option does not fit the file.
        SfiError: The trace cannot be written.
    """
    with open_arrays(path) as arrays:
        source = (AttentionArrays if has_attention(arrays.names) else SelectionArrays)(arrays, top, kv_heads)
        trigger_ids = source.header.tokens.triggers
        if trigger_ids is None:
            known = tokenizer is not None
            trigger_ids = build_trigger_set(tokenizer, triggers).token_ids if known else ()
        manifest = _describe(path, source.header, trigger_ids, tokenizer)
        with _new_trace(folder, force=force) as work:
            text = None if tokenizer is None else TokenText(tokenizer)
            _write(source, work, manifest, text, progress)
    return manifest


@contextmanager
def _new_trace(folder: Path, *, force: bool) -> Iterator[Path]:
    # a folder beside `folder`; its files move there once the block has ended well
    fresh = not folder.exists()
    lock, whole = claim(folder, force=force), folder.resolve()  # "." has no name
    work: Path | None = None
    try:
        work = Path(mkdtemp(".tmp", f".{whole.name[:KEPT]}.", whole.parent))
        yield work
        clear(folder)
        for piece in sorted(work.iterdir()):
            piece.replace(folder / piece.name)
    except OSError as error:
        raise SfiError(f"trace folder {folder} cannot be written: {error.strerror}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        lock.release()
        if fresh:
            with suppress(OSError):  # not empty: the trace is there
                folder.rmdir()


def _write(source: Source, folder: Path, manifest: dict[str, Any], text: TokenText | None, progress: Progress) -> None:
    parts = PartFiles(folder, file_metadata(manifest))
    tables = _TraceTables(parts, source.header, frozenset(manifest["trigger_token_ids"]), text)
    tables.prompt()
    steps = len(source.header.tokens.token_ids)
    for number, step in enumerate(source.steps()):
        tables.step(number, step)
        progress(number + 1, steps)
    tables.flush()
    top = max(1, tables.top)
    manifest["audit"]["top"] = manifest["config"]["budget"] = top
    manifest |= {"finished": now(), "tables": parts.written}
    write_manifest(folder, manifest)


def _describe(path: Path, header: Header, triggers: tuple[int, ...], tokenizer: Any) -> dict[str, Any]:
    # nothing is known of the other program's memory: these settings leave it empty
    tokens = header.tokens
    config = SfiConfig().replace(sink=0, recent=1, recent_mode="sliding")
    event = RunEvent(
        batch=1,
        requests=1,
        policy=POLICY,
        backend="",
        device="",
        config=config.to_dict(),
        trigger_token_ids=triggers,
        model=_model(header, tokenizer),
        audit=AuditConfig().to_dict(),
    )
    of_header = {name: getattr(header, name) for name in ("kind", "masses", "block_size")}
    imported = {"file": path.name, "version": VERSION, **of_header}
    described = describe_run(event, {"imported": imported}, positions=True, redacted=False)
    ids = None if tokens.prompt_ids is None else tokens.prompt_ids.astype("<i4").tobytes()
    sha256 = None if ids is None else hashlib.sha256(ids).hexdigest()
    prompt = {"request": 0, "tokens": tokens.prompt_tokens, "sha256": sha256}
    return described | {"backend": None, "device": None, "prompts": [prompt]}


def _model(header: Header, tokenizer: Any) -> dict[str, Any]:
    # as `describe_model`; widths and bytes are unknown
    heads: dict[int, int] = {}
    for layer, _ in header.place_U:
        heads[layer] = heads.get(layer, 0) + 1
    unknown = dict.fromkeys(("key_width", "value_width", "itemsize", "window"))
    return {
        "name": header.tokens.model or UNNAMED,
        "architecture": POLICY,
        "layers": [{"layer": layer, "heads": count, **unknown} for layer, count in heads.items()],
        "query_heads": header.query_heads,
        **dict.fromkeys(("model_type", "dtype", "weight_bytes", "embedding_bytes", "max_positions")),
        "vocabulary": None if tokenizer is None else len(tokenizer),
    }


class _TraceTables:
    """Turns a file's steps into rows, and writes parts as they fill; `top` counts a row's most positions."""

    def __init__(self, parts: PartFiles, header: Header, triggers: frozenset[int], text: TokenText | None) -> None:
        self.top = 0
        self._parts, self._header, self._triggers, self._text = parts, header, triggers, text
        self._tables = {name: TableBuffer(schema) for name, schema in TABLES.items()}
        self._layer_U, self._head_U = np.array(header.place_U).T
        self._sentence, self._sets = 0, SelectedSets(len(self._layer_U))
        self._answer = None if text is None else text.another()

    def prompt(self) -> None:
        """Add the prompt's tokens, if the file has their ids."""
        tokens = self._header.tokens
        if tokens.prompt_ids is None:
            return
        texts = tokens.prompt_texts
        if texts is None and self._text is not None:
            texts = list(map(self._text.another(), tokens.prompt_ids.tolist()))
        columns = {
            "request": 0,
            "position": np.arange(tokens.prompt_tokens),
            "token_id": tokens.prompt_ids,
            "token_text": None if texts is None else np.array(texts, object),
        }
        self._add("prompts", tokens.prompt_tokens, columns)

    def step(self, number: int, step: ImportedStep) -> None:
        """Add a step."""
        token_id = int(self._header.tokens.token_ids[number])
        self._add("steps", 1, self._step_row(number, token_id, step.attended_tokens))
        self._sentence += token_id in self._triggers
        change = self._sets.replace(np.arange(len(self._layer_U)), step.index_UK)
        key = {"request": 0, "step": number, "layer": self._layer_U, "head": self._head_U}
        known_UK = step.index_UK >= 0
        positions = Lists.of(step.index_UK, known_UK)
        supports = {
            **key,
            "positions": positions,
            "mass": None if step.mass_UK is None else Lists.of(step.mass_UK, known_UK),
            "retained_mass": step.retained_U,
            "overlap_previous_step": change["overlap_previous"],
            "overlap_last_refresh": change["overlap_previous"],  # every step refreshed
        }
        self._add("supports", len(known_UK), supports)
        if self._header.kind == "selections":
            selections = {**key, **change, "positions": positions, "reason": ""}
            self._add("selections", len(known_UK), selections)
        self.top = max(self.top, int(change["selected"].max()))
        if sum(table.nbytes for table in self._tables.values()) >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows; see `PartFiles.flush`."""
        self._parts.flush(self._tables)

    def _step_row(self, number: int, token_id: int, attended_tokens: float) -> dict[str, Any]:
        tokens = self._header.tokens
        text, context_tokens = None if tokens.texts is None else tokens.texts[number], tokens.prompt_tokens + number
        if text is None and self._answer is not None:
            text = self._answer(token_id)
        return {
            "request": 0,
            "step": number,
            "token_id": token_id,
            "token_text": text,
            "attended_tokens": attended_tokens,
            "context_tokens": context_tokens,
            "position": context_tokens - 1,
            "slow": True,
            "reason": REASON,
            "steps_since_slow": 0,
            "sentence": self._sentence,
            "trigger": token_id in self._triggers,
            "read_ratio": attended_tokens / context_tokens,
            "audited": True,
            "batch_step": number,
            "drafted": False,
        }

    def _add(self, name: str, rows: int, columns: dict[str, Any]) -> None:
        # columns that an import does not know are null
        self._tables[name].add_columns(rows, {**dict.fromkeys(TABLES[name].names), **columns})
