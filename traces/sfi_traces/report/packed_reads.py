"""Packs what each step read, for the report's page: by refresh, layer and cell of the source text."""

import base64
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_core.machine.text import printable_lines
from sfi_traces.model.request import Request
from sfi_traces.model.supports import thinning
from sfi_traces.model.trace import Place, of_steps
from sfi_traces.report.text import MOST_TOKENS
from sfi_traces.views.words import text_of

MOST_CELLS = 12_000  # of the source text; beyond, a cell stands for several tokens
MOST_COUNTS = 32 << 20  # refreshes x layers x cells: bytes in the browser's memory
MOST_BYTES = 3_500_000  # of these counts, packed; later refreshes are left out
MOST_LISTS = 10_000  # audited steps x layers
LIST = 32  # cells with the most mass that are kept of each audited step and layer
TOGETHER = 1 << 22  # positions read at once, about; at least those of a refresh

Packed = dict[str, Any]


def what_steps_read(request: Request) -> Packed:
    """Pack what the steps of a request read, as plain values.

    The source text in `cells`; for each refresh, layer and cell how many KV heads selected a position of it
    (`counts`); and the cells with the most mass of each audited step (`mass`). Raises `TraceError` if the
    trace has no text, or neither positions nor an audit.
    """
    texts = text_of(request)
    steps = request.steps
    shown = min(len(steps.step), MOST_TOKENS)
    prompt = len(texts) - len(steps.text)
    dense = request.trace.manifest["config"]["dense_layers"]
    layers = sorted({layer for layer, _ in request.places if layer not in dense})
    selections = request.selections
    last = int(steps.step[shown - 1])
    begins = np.unique(selections.begin[selections.begin <= last])
    width = prompt + shown
    fitting = MOST_COUNTS // max(1, len(begins) * len(layers))
    per_cell = thinning(width, max(1, min(MOST_CELLS, fitting)))
    cells = -(-width // per_cell)
    sink, start_N = request.segments
    recent = None if start_N is None else start_N[:shown].tolist()
    counts = _counts(request, begins, layers, per_cell, cells)
    mass = _mass(request, last, per_cell, cells)
    if counts is None and mass is None and (recent is None or len(begins)):
        raise TraceError(
            f"trace {request.trace.path} does not say what its steps read; record it with "
            "--set trace.positions=true, or with --audit 1"
        )
    return {
        "cells": [printable_lines("".join(texts[at : at + per_cell])) for at in range(0, width, per_cell)],
        "perCell": per_cell,
        "prompt": prompt,
        "first": int(steps.step[0]),
        "slow": [] if request.trace.reads_own_selection else np.flatnonzero(steps.slow[:shown]).tolist(),
        "sink": sink,
        "recent": recent,
        "layers": layers,
        "heads": [sum(place[0] == layer for place in request.places) for layer in layers],
        "dense": sorted(set(dense)),
        "counts": counts,
        "mass": mass,
    }


def _counts(request: Request, begins: np.ndarray, layers: list[int], per_cell: int, cells: int) -> Packed | None:
    # [refreshes, layers, cells] uint8, as differences from the refresh before, modulo 256
    packer, now = zlib.compressobj(6), np.zeros((len(layers), cells), np.uint8)
    row_of = {layer: row for row, layer in enumerate(layers)}
    held: dict[Place, np.ndarray] = {}
    packed, kept = b"", 0
    for chosen in _refreshed(request, begins, layers):
        if chosen is None:
            return None
        before = now.copy()
        for place, position in chosen:
            if place in held:
                now[row_of[place[0]], held[place]] -= 1
            cell = position // per_cell  # ascending
            held[place] = cell[np.diff(cell, prepend=-1) > 0]
            now[row_of[place[0]], held[place]] += 1
        packed += packer.compress((now - before).tobytes())
        kept += 1
        if len(packed) > MOST_BYTES:
            break
    if not kept:
        return None
    until = int(begins[kept]) if kept < len(begins) else None
    packed += packer.flush()
    return {"begins": begins[:kept].tolist(), "until": until, "packed": _base64(packed)}


def _refreshed(
    request: Request, begins: np.ndarray, layers: list[int]
) -> Iterator[list[tuple[Place, np.ndarray]] | None]:
    # the selections that begin at each of the steps `begins`; None if recorded without positions
    selections = request.selections
    edges = np.searchsorted(selections.begin, np.append(begins, begins[-1:] + 1))
    budget = request.trace.manifest["config"].get("budget", 1)
    together = max(1, TOGETHER // max(1, budget * len(selections.of_place)))
    for at in range(0, len(begins), together):
        part = edges[at : at + together + 1]
        rows = np.arange(part[0], part[-1])
        rows = rows[np.isin(selections.layer[rows], layers)]
        refreshes: dict[int, list[tuple[Place, np.ndarray]]] = {int(begin): [] for begin in begins[at : at + together]}
        positions = selections.positions(rows)
        if positions is None:
            yield None
            return
        for row, position in zip(rows, positions, strict=True):
            place = int(selections.layer[row]), int(selections.head[row])
            refreshes[int(selections.begin[row])].append((place, position))
        yield from refreshes.values()


def _mass(request: Request, last: int, per_cell: int, cells: int) -> Packed | None:
    # [steps, layers, LIST, 3] uint16: cell, mass and unread mass, scaled to 65,535
    wanted = request.wanted & (pc.field("step") <= last)
    audited = request.trace.rows("supports", ["step", "layer"], wanted)
    steps = np.unique(audited["step"].to_numpy())
    if not len(steps) or not request.trace.masses:
        return None
    layers = sorted(set(pc.unique(audited["layer"]).to_pylist()))
    every = thinning(len(steps) * len(layers), MOST_LISTS)
    steps = steps[::every]
    lists = np.zeros((len(steps), len(layers), LIST, 3), np.uint16)
    columns = ["step", "layer", "positions", "mass", "read"]
    known = True
    for at in range(0, len(steps), LIST):
        table = request.trace.rows("supports", columns, wanted & of_steps(steps[at : at + LIST]))
        known &= table["read"].null_count == 0
        for key, group in _grouped(table):
            place = int(np.searchsorted(steps, key[0])), layers.index(key[1])
            lists[place] = _strongest(*group, per_cell, cells)
    return {
        "steps": steps.tolist(), "every": every, "layers": layers, "list": LIST, "known": bool(known),
        "packed": _base64(zlib.compress(lists.tobytes(), 6)),
    }  # fmt: skip


Group = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def _grouped(table: pa.Table) -> Iterator[tuple[tuple[int, int], Group]]:
    # for each step and layer: positions, masses and whether unread, of all heads; number of heads
    table = table.sort_by([("step", "ascending"), ("layer", "ascending")]).combine_chunks()
    length = pc.list_value_length(table["positions"]).to_numpy()
    ends = np.concatenate([[0], np.cumsum(length)])
    position, mass = (pc.list_flatten(table[name]).to_numpy() for name in ("positions", "mass"))
    missed = np.zeros(len(position), bool)
    if table["read"].null_count == 0:
        missed = ~pc.list_flatten(table["read"]).to_numpy()
    step, layer = table["step"].to_numpy().astype(np.int64), table["layer"].to_numpy()
    edges = np.flatnonzero(np.diff(step << 16 | layer, prepend=-1))
    for low, high in zip(edges, [*edges[1:], len(table)], strict=True):
        rows = slice(ends[low], ends[high])
        yield (int(step[low]), int(layer[low])), (position[rows], mass[rows], missed[rows], high - low)


def _strongest(
    position: np.ndarray, mass: np.ndarray, missed: np.ndarray, heads: int, per_cell: int, cells: int
) -> np.ndarray:
    cell = position // per_cell
    inside = cell < cells
    whole = np.bincount(cell[inside], mass[inside], minlength=cells) / heads
    lost = np.bincount(cell[inside], (mass * missed)[inside], minlength=cells) / heads
    top = np.argsort(-whole, kind="stable")[:LIST]
    numbers = np.zeros((LIST, 3), np.uint16)
    for column, value in enumerate((top, whole[top] * 65_535, lost[top] * 65_535)):
        numbers[: len(top), column] = np.round(value)
    return numbers


def _base64(packed: bytes) -> str:
    return base64.b64encode(packed).decode()
