"""The text of a request, token by token, and what each step read of it, packed for the report's page."""

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_core.machine.text import printable, printable_lines
from sfi_traces.model.request import Request
from sfi_traces.model.supports import thinning
from sfi_traces.model.trace import Place, of_steps
from sfi_traces.views.captions import visible
from sfi_traces.views.table import dense_words
from sfi_traces.views.words import step_words, text_of

MOST_TOKENS, MOST_STEPS, LONGEST = 10_000, 12, 90  # generated tokens; disagreements; characters of a passage
MOST_CELLS = 12_000  # of the source text; beyond, a cell stands for several tokens
MOST_COUNTS = 32 << 20  # refreshes x layers x cells: bytes in the browser's memory
MOST_BYTES = 3_500_000  # of these counts, packed; later refreshes are left out
MOST_LISTS = 10_000  # audited steps x layers
LIST = 32  # cells with the most mass that are kept of each audited step and layer
TOGETHER = 1 << 22  # positions read at once, about; at least those of a refresh

Packed = dict[str, Any]


def generated(request: Request) -> dict[str, Any]:
    """Split the generated tokens into sentences, each with its first `step` and its `tokens`.

    `marked` says whether slow steps are marked, `left_out` how many tokens are left out.
    """
    steps, other = request.steps, set(request.disagreeing)
    worded = any(steps.text)  # an empty one is part of a character then
    sentences: list[dict[str, Any]] = []
    for row in range(min(len(steps.step), MOST_TOKENS)):
        if row == 0 or steps.sentence[row] != steps.sentence[row - 1]:
            sentences.append({"step": int(steps.step[row]), "tokens": []})
        sentences[-1]["tokens"].append(
            {
                "text": printable(steps.text[row]) if worded else f" {steps.step[row]} ",
                "slow": bool(steps.slow[row]),
                "other": int(steps.step[row]) in other,
                "about": _about(request, row),
            }
        )
    return {
        "sentences": sentences,
        "marked": not steps.slow.all(),  # not where every step is slow
        "left_out": max(0, len(steps.step) - MOST_TOKENS),
    }


def disagreements(request: Request, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """List the steps where full attention would have said another token, with what the step missed most.

    `steps` are the summary's, the largest KL first; `left_out` counts those that are not listed.
    """
    rows = request.steps.rows(np.array([step["step"] for step in steps], int)).tolist()
    shown = [(row, step) for row, step in zip(rows, steps, strict=True) if row < MOST_TOKENS][:MOST_STEPS]
    listed = [
        {
            "row": row,
            "step": step["step"],
            "token": printable(step["token_text"] or ""),
            "dense": dense_words(step),
            "kl": f"{step['kl_next_token']:.3f}",
            "missed": _missed(request, step["step"]),
        }
        for row, step in shown
    ]
    return {"listed": listed, "left_out": len(steps) - len(shown)}


def _missed(request: Request, step: int) -> str:
    try:
        missed = step_words(request, step)["missed"]
    except TraceError:  # no text, or no positions of selections
        return ""
    return f"{visible(missed[0]['text'], LONGEST)} ({missed[0]['mass'] or 0:.1%} of the attention)" if missed else ""


def _about(request: Request, row: int) -> str:
    steps = request.steps
    kind = f"slow, {steps.reason[row]}" if steps.slow[row] else "fast"
    kind += ", drafted" if steps.drafted[row] else ""
    elapsed_us = steps.elapsed_us[row]  # an imported trace has none
    took = "" if np.isnan(elapsed_us) else f"; {elapsed_us / 1000:,.2f} ms"
    dense = request.compared.get(int(steps.step[row]))
    if dense is not None and not dense["argmax_agrees"]:
        took += f"; full attention: {dense_words(dense)}"
    return f"step {steps.step[row]}: {kind}; attended {steps.attended[row]:,.0f} of {steps.context[row]:,} tokens{took}"


def what_steps_read(request: Request) -> Packed:
    """Pack what the steps of a request read, as plain values.

    The source text in `cells`; for each refresh, layer and cell how many KV heads selected a position of it
    (`counts`); and the cells with the most mass of each audited step (`mass`). Raises `TraceError` if the
    trace has no text, or neither positions nor an audit.
    """
    texts = text_of(request)
    steps = request.steps
    shown = min(len(steps.step), MOST_TOKENS)
    prompt_tokens = len(texts) - len(steps.text)
    dense = request.trace.manifest["config"]["dense_layers"]
    layers = sorted({layer for layer, _ in request.places if layer not in dense})
    selections = request.selections
    last = int(steps.step[shown - 1])
    begins = np.unique(selections.begin[selections.begin <= last])
    width = prompt_tokens + shown
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
        "prompt": prompt_tokens,
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
    packed, refreshes = b"", 0
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
        refreshes += 1
        if len(packed) > MOST_BYTES:
            break
    if not refreshes:
        return None
    until = int(begins[refreshes]) if refreshes < len(begins) else None
    packed += packer.flush()
    return {"begins": begins[:refreshes].tolist(), "until": until, "packed": _base64(packed)}


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
        for step, layer, numbers in _strongest(table, per_cell, cells):
            lists[np.searchsorted(steps, step), layers.index(layer)] = numbers
    return {
        "steps": steps.tolist(), "every": every, "layers": layers, "list": LIST, "known": bool(known),
        "packed": _base64(zlib.compress(lists.tobytes(), 6)),
    }  # fmt: skip


def _strongest(table: pa.Table, per_cell: int, cells: int) -> Iterator[tuple[int, int, np.ndarray]]:
    # each step and layer, and its cells with the most mass of all heads: cell, mass, unread mass
    table = table.sort_by([("step", "ascending"), ("layer", "ascending")]).combine_chunks()
    ends = np.concatenate([[0], np.cumsum(pc.list_value_length(table["positions"]).to_numpy())])
    position, mass = (pc.list_flatten(table[name]).to_numpy() for name in ("positions", "mass"))
    missed = np.zeros(len(position), bool)
    if table["read"].null_count == 0:
        missed = ~pc.list_flatten(table["read"]).to_numpy()
    step, layer = table["step"].to_numpy().astype(np.int64), table["layer"].to_numpy()
    edges = np.flatnonzero(np.diff(step << 16 | layer, prepend=-1))
    for low, high in zip(edges, [*edges[1:], len(table)], strict=True):
        rows = slice(ends[low], ends[high])
        cell = position[rows] // per_cell
        inside = cell < cells
        masses = mass[rows][inside], (mass[rows] * missed[rows])[inside]
        shares = [np.bincount(cell[inside], each, minlength=cells) / (high - low) for each in masses]
        top = np.argsort(-shares[0], kind="stable")[:LIST]
        numbers = np.zeros((LIST, 3), np.uint16)
        numbers[: len(top)] = np.round(np.stack([top, *(each[top] * 65_535 for each in shares)], 1))
        yield int(step[low]), int(layer[low]), numbers


def _base64(packed: bytes) -> str:
    return base64.b64encode(packed).decode()
