"""Turns a file of selections or attention into a trace."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from sfi_core.errors import InputError, SfiError
from sfi_core.machine.files import KEPT
from sfi_core.observers.events import RunEvent
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger_set import build_trigger_set
from sfi_traces.importing.arrays import FORMATS, open_arrays
from sfi_traces.importing.attention import AttentionArrays, has_attention
from sfi_traces.importing.row_table import SelectionRows
from sfi_traces.importing.schema import VERSION, Header, ImportOptions
from sfi_traces.importing.selections import SelectionArrays
from sfi_traces.importing.trace_tables import TraceTables
from sfi_traces.record.folder import claim, clear, describe_run, file_metadata, now, write_manifest
from sfi_traces.record.part_files import PartFiles
from sfi_traces.record.token_text import TokenText

POLICY = "imported"
UNNAMED = "unnamed"  # one name, so that sfi trace diff compares files without a model's name
Progress = Callable[[int, int], None]  # rows read, of how many
Source = SelectionRows | SelectionArrays | AttentionArrays


@contextmanager
def open_source(path: Path, options: ImportOptions) -> Iterator[Source]:
    """Open a file to import; its steps can be read within the block.

    Raises `InputError` if the file cannot be read or contradicts docs/import.md, `ConfigError` for an option that does
    not fit the file.
    """
    if path.suffix not in FORMATS:
        raise InputError(f"import {path} must end in one of {FORMATS}, got {path.suffix or 'nothing'}")
    if path.exists() and not path.is_file():
        raise InputError(f"import {path} must be a regular file, got another")
    if path.suffix == ".parquet":
        yield SelectionRows(path, options)
        return
    with open_arrays(path) as arrays:
        arrays.check_version()
        kind = AttentionArrays if has_attention(arrays.names) else SelectionArrays
        yield kind(arrays, options)


def import_trace(
    path: Path,
    folder: Path,
    options: ImportOptions | None = None,
    *,
    tokenizer: Any = None,
    triggers: Sequence[str] = SfiConfig().triggers,
    force: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> dict[str, Any]:
    """Write a file as a trace, whole or not at all, and return the trace's manifest.

    Args:
        path: The file; docs/import.md describes its contents.
        folder: Where the trace goes.
        options: What to take from the file.
        tokenizer: Gives the tokens' text and T_trig where the file has none.
        triggers: Trigger strings, for the tokenizer.
        force: Whether to overwrite a trace.
        progress: Told how many rows are read, and of how many.

    Raises:
        InputError: The file contradicts docs/import.md; names the row.
        ConfigError: The folder may not be overwritten, or an option does not fit the file.
        SfiError: The trace cannot be written.
    """
    with open_source(path, options or ImportOptions()) as source:
        trigger_ids = source.header.trigger_token_ids
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
    header, parts = source.header, PartFiles(folder, file_metadata(manifest))
    tables = TraceTables(parts, header, frozenset(manifest["trigger_token_ids"]), text)
    for step in source.steps():
        if step.step == 0:
            prompt = header.prompts[step.request]
            tables.prompt(step.request, prompt)
            ids = None if prompt.token_ids is None else prompt.token_ids.astype("<i4").tobytes()
            sha256 = None if ids is None else hashlib.sha256(ids).hexdigest()
            manifest["prompts"].append({"request": step.request, "tokens": prompt.tokens, "sha256": sha256})
        tables.step(step)
        progress(step.row, header.rows)
    tables.flush()
    top = max(1, tables.top)
    manifest["audit"]["top"] = manifest["config"]["budget"] = top
    manifest |= {"finished": now(), "tables": parts.written}
    write_manifest(folder, manifest)


def _describe(path: Path, header: Header, triggers: tuple[int, ...], tokenizer: Any) -> dict[str, Any]:
    # nothing is known of the other program's memory: these settings leave it empty
    config = SfiConfig().replace(sink=0, recent=1, recent_mode="sliding")
    event = RunEvent(
        batch=len(header.prompts),
        requests=len(header.prompts),
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
    return described | {"backend": None, "device": None}


def _model(header: Header, tokenizer: Any) -> dict[str, Any]:
    # as `describe_model`; widths and bytes are unknown
    heads: dict[int, int] = {}
    for layer, _ in header.place_U:
        heads[layer] = heads.get(layer, 0) + 1
    unknown = dict.fromkeys(("key_width", "value_width", "itemsize", "window"))
    return {
        "name": header.model or UNNAMED,
        "architecture": POLICY,
        "layers": [{"layer": layer, "heads": count, **unknown} for layer, count in heads.items()],
        "query_heads": header.query_heads,
        **dict.fromkeys(("model_type", "dtype", "weight_bytes", "embedding_bytes", "max_positions")),
        "vocabulary": None if tokenizer is None else len(tokenizer),
    }
