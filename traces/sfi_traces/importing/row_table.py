"""Imports selections from the rows of a Parquet file: one for each step and layer (and head)."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.text import shown
from sfi_traces.importing.arrays import readable
from sfi_traces.importing.row_metadata import read_metadata, read_prompts
from sfi_traces.importing.schema import (
    COLUMNS,
    LARGEST,
    LAYERS,
    PADDING,
    VERSION_NAME,
    Header,
    ImportedStep,
    ImportOptions,
    Place,
    check_known,
    check_version,
)
from sfi_traces.importing.selections import check_block_size, check_top, selected_step
from sfi_traces.overlap import padded
from sfi_traces.schema import MOST_TOKENS

ROWS = 4096  # in memory at once, besides the rows of one step
Group = tuple[int, pa.Table]  # the rows of a step, after the number of the first one in the file


class SelectionRows:
    """The steps of a Parquet file of selections; `header` is what is known before they are read."""

    def __init__(self, path: Path, options: ImportOptions) -> None:
        """Read the file's metadata and its first step.

        Raises `InputError` for a column that is missing or of another type, `ConfigError` for an option that does not
        fit.
        """
        if options.kv_heads is not None:
            raise ConfigError(f"kv-heads must come with arrays, got {path.name}")
        self._path, self._top = path, options.top
        with readable(path), parquet.ParquetFile(path) as file:
            self._schema, rows = file.schema_arrow, file.metadata.num_rows
            self._together = _rows_together(file.metadata)
            said = read_metadata(path, file)
        check_version(path, said.get(VERSION_NAME))
        self._columns = self._checked_columns()
        self._name = "blocks" if "blocks" in self._columns else "positions"
        block_size = said.get("block_size")
        check_block_size(path, block_size, self._name)
        check_top(options.top, block_size, ranked=bool({"mass", "scores"} & set(self._columns)))
        self._prompts = read_prompts(path, said)
        with closing(self._groups()) as groups:
            first = next(groups, None)
        if first is None:
            raise InputError(f"import {path} must have a row, got none")
        places = self._places(*first)
        self._check_heads(places)
        triggers = said.get("trigger_token_ids")
        self.header = Header(
            kind="selections",
            place_U=places,
            query_heads=1 + max(head for _, head in places),
            prompts=self._prompts,
            trigger_token_ids=None if triggers is None else tuple(sorted(triggers)),
            masses="mass" in self._columns,
            block_size=block_size,
            model=said.get("model"),
            rows=rows,
        )

    def steps(self) -> Iterator[ImportedStep]:
        """Yield the steps; raises `InputError`, which names the faulty row."""
        last = (0, -1)
        with closing(self._groups()) as groups:
            for begin, rows in groups:
                last = self._next(begin, rows, last)
                places = self._places(begin, rows)
                if places != self.header.place_U:
                    raise InputError(self._other_places(begin, last[1], places))
                yield self._step(begin, rows, *last)

    def _step(self, begin: int, rows: pa.Table, request: int, step: int) -> ImportedStep:
        order = np.lexsort((_numbers(rows, "head"), _numbers(rows, "layer")))

        def where(unit: int) -> str:
            return self._row(begin + int(order[unit]))

        values = {
            name: padded(rows[name], empty)[order] if name in self._columns else None
            for name, empty in ((self._name, PADDING), ("mass", 0.0), ("scores", 0.0))
        }
        index_UK = values[self._name]
        assert index_UK is not None, "the file has positions or blocks"
        self._check_beside(rows, begin)
        texts = rows["token_text"].to_pylist() if "token_text" in self._columns else [None]
        return selected_step(
            index_UK, values["mass"], values["scores"], block_size=self.header.block_size, top=self._top,
            where=where, request=request, step=step, token_id=self._token(begin, rows), token_text=texts[0],
            context_tokens=self._prompts[request].tokens + step, row=begin + len(rows),
        )  # fmt: skip

    def _groups(self) -> Generator[Group]:
        with readable(self._path), parquet.ParquetFile(self._path) as file:
            begin, left = 0, None
            for batch in file.iter_batches(self._together, columns=self._columns):
                piece = self._filled(pa.table(batch), begin + (0 if left is None else len(left)))
                table = piece if left is None else pa.concat_tables([left, piece])
                keys = np.stack([_numbers(table, name) for name in ("request", "step")])
                edges = [0, *(np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0)) + 1).tolist()]
                for first, end in pairwise(edges):
                    yield begin + first, table.slice(first, end - first)
                begin, left = begin + edges[-1], table.slice(edges[-1])
            if left is not None and len(left):
                yield begin, left

    def _filled(self, table: pa.Table, begin: int) -> pa.Table:
        # adds a request and a head where the file has none, and makes positions signed
        for name in table.column_names:
            if table[name].null_count and name != "token_text":
                at = begin + int(pc.index(table[name].is_null(), value=True).as_py())
                raise InputError(f"{self._row(at)}: {name} must have a value, got null")
        for name in {"positions", "blocks", "mass", "scores"} & set(table.column_names):
            values = pc.list_flatten(table[name])
            if values.null_count:
                inner = pc.index(values.is_null(), value=True).as_py()
                at = begin + pc.list_parent_indices(table[name])[inner].as_py()
                raise InputError(f"{self._row(at)}: {name} must have no null, got one")
        for name in {"positions", "blocks"} & set(table.column_names):
            lists = table[name].cast(pa.list_(pa.int64()))
            table = table.set_column(table.column_names.index(name), name, lists)
        for name in ("request", "head"):
            if name not in table.column_names:
                table = table.append_column(name, pa.array(np.zeros(len(table), np.int64)))
        return table

    def _next(self, begin: int, rows: pa.Table, last: tuple[int, int]) -> tuple[int, int]:
        # request and step of the rows, which must follow `last`
        request, step = (int(_numbers(rows, name)[0]) for name in ("request", "step"))
        if (request, step) not in ((last[0], last[1] + 1), (last[0] + 1, 0)):
            raise InputError(
                f"{self._row(begin)}: steps must ascend from 0 on without a gap, by request, got request "
                f"{request}, step {step} after request {last[0]}, step {last[1]}"
            )
        if request >= len(self._prompts):
            raise InputError(
                f"{self._row(begin)}: request must be one of the {len(self._prompts)} with a prompt, got {request}"
            )
        return request, step

    def _places(self, begin: int, rows: pa.Table) -> list[Place]:
        seen: set[Place] = set()
        numbers = (_numbers(rows, name).tolist() for name in ("layer", "head"))
        for at, pair in enumerate(zip(*numbers, strict=True)):
            if pair in seen:
                raise InputError(
                    f"{self._row(begin + at)}: layer {pair[0]}, head {pair[1]} must come once a step, got twice"
                )
            seen.add(pair)
        return sorted(seen)

    def _other_places(self, begin: int, step: int, places: list[Place]) -> str:
        missing = set(self.header.place_U) - set(places)
        verb, names = ("have", missing) if missing else ("have no", set(places) - {*self.header.place_U})
        layer, head = min(names)
        return (
            f"{self._row(begin)}: step {step} must {verb} layer {layer}, head {head}, as the first step, got "
            f"{len(places)} layers and heads"
        )

    def _check_heads(self, places: list[Place]) -> None:
        for layer in {layer for layer, _ in places}:
            heads = [head for own, head in places if own == layer]
            if not 0 <= layer < LAYERS:
                raise InputError(f"import {self._path}: layer must be in 0 to {LAYERS - 1}, got {layer}")
            if heads != list(range(len(heads))):
                raise InputError(
                    f"import {self._path}: heads of layer {layer} must be 0, 1, ... without a gap, got {heads}"
                )

    def _check_beside(self, rows: pa.Table, begin: int) -> None:
        sizes = pc.list_value_length(rows[self._name]).to_numpy()
        for name in {"mass", "scores"} & set(self._columns):
            wrong = pc.list_value_length(rows[name]).to_numpy() != sizes
            if wrong.any():
                at = int(np.argmax(wrong))
                got = pc.list_value_length(rows[name])[at]
                raise InputError(
                    f"{self._row(begin + at)}: {name} must be {sizes[at]} numbers as {self._name}, got {got}"
                )

    def _token(self, begin: int, rows: pa.Table) -> int:
        ids = _numbers(rows, "token_id")
        wrong = (ids != ids[0]) | (ids < 0) | (ids > LARGEST)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(
                f"{self._row(begin + at)}: token_id must be one in 0 to {LARGEST} for all of a step, "
                f"got {ids[at]} and {ids[0]}"
            )
        return int(ids[0])

    def _checked_columns(self) -> list[str]:
        names = self._schema.names
        check_known(self._path, "column", names, COLUMNS)
        given = [name for name in ("positions", "blocks") if name in names]
        if len(given) != 1:
            raise InputError(
                f"import {self._path} must have positions or blocks, got {' and '.join(given) or 'neither'}"
            )
        for name in ("step", "layer", "token_id"):
            if name not in names:
                raise InputError(f"import {self._path} must have the column {name}, got {shown(names)}")
        for field in self._schema:
            self._check_type(field)
        if given == ["blocks"] and {"mass", "scores"} & set(names):
            raise InputError(f"mass and scores of {self._path} must be of positions, got blocks")
        return list(names)

    def _check_type(self, field: pa.Field) -> None:
        kind, lists = field.type, field.name in ("positions", "blocks", "mass", "scores")
        if lists:
            kind = getattr(kind, "value_type", pa.null())
        rules: dict[str, Callable[[pa.DataType], bool]] = {
            "mass": pa.types.is_floating, "scores": pa.types.is_floating, "token_text": pa.types.is_string,
        }  # fmt: skip
        wanted = {"mass": "lists of numbers", "scores": "lists of numbers", "token_text": "strings"}
        if not rules.get(field.name, pa.types.is_integer)(kind):
            some = "lists of whole numbers" if lists else "whole numbers"
            raise InputError(
                f"column {field.name} of {self._path} must be {wanted.get(field.name, some)}, got {field.type}"
            )

    def _row(self, row: int) -> str:
        return f"row {row:,} of {self._path}"


def _rows_together(metadata: parquet.FileMetaData) -> int:
    # rows of a batch; raises ValueError for a file whose rows must be too long for a trace
    together = ROWS
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        values = max((group.column(at).num_values for at in range(group.num_columns)), default=0)
        if values > group.num_rows * MOST_TOKENS:
            raise ValueError(f"a row must have {MOST_TOKENS:,} positions at most, got {values:,} in {group.num_rows:,}")
        together = min(together, max(1, MOST_TOKENS * group.num_rows // max(1, values)))
    return together


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), np.int64)
