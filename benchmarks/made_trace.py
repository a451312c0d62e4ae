"""Writes a trace of made-up selections, as long as is asked for; long_trace.py says what is in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sfi_core.settings.config import SfiConfig
from sfi_traces.record.folder import PartFiles, now, write_manifest
from sfi_traces.schema import SCHEMA_VERSION, TABLES

RUN = 8  # neighboring positions of a selection
READ = 0.8  # of a support
KEPT = 0.7  # of the runs, from one refresh to the next
TOGETHER = 20  # refreshes of a part
BEGINS, ENDS = ("ba", "do", "fi", "gu", "ke"), ("lan", "mer", "nost", "p", "rid", "sun")
WORDS = [f" {a}{b}" for a in BEGINS for b in ENDS]
SENTENCE = 20  # steps from one slow step to the next, on average
STOP = 3  # the token id that ends a sentence
ABOUT_US = {
    "append": 4.0, "attention.fast": 9.0, "attention.dense": 60.0, "selector": 40.0, "top_k": 20.0,
    "pack": 15.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How long a trace is made.

    Attributes:
        steps: Decoding steps.
        layers: Layers, all of full attention.
        heads: KV heads of each.
        budget: Positions of a selection, per KV head; a multiple of 8.
        prompt: Tokens of the prompt.
        audit: Every n-th step has supports, and the slow ones; None for no audit.
        audited_layers: How many layers have supports.
        top: Positions of a support; a multiple of 8.
    """

    steps: int = 32_768
    layers: int = 36
    heads: int = 8
    budget: int = 512
    prompt: int = 32_768
    audit: int | None = None
    audited_layers: int = 2
    top: int = 256


def write(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write a trace of that shape into a folder that does not exist yet."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    document = _manifest(shape)
    parts = PartFiles(folder, document)
    slow, sentence = _slow(shape, rng)
    ids = rng.integers(4, 4 + len(WORDS), shape.prompt + shape.steps).astype(np.int32)
    ends = shape.prompt + np.flatnonzero(slow)[1:] - 1
    ids[ends] = STOP
    texts = np.array(["", "", "", ".", *WORDS], object)[ids]
    prompt = np.arange(shape.prompt, dtype=np.int32)
    parts.write(
        "prompts", _table("prompts", shape.prompt, position=prompt, token_id=ids[prompt], token_text=texts[prompt])
    )
    audited = np.zeros(shape.steps, bool) if shape.audit is None else slow | (np.arange(shape.steps) % shape.audit == 0)
    parts.write("steps", _steps(shape, slow, sentence, ids[shape.prompt :], texts[shape.prompt :], audited))
    for table in _selections(shape, np.flatnonzero(slow), rng):
        parts.write("selections", table)
    for table in _timings(shape, slow, rng):
        parts.write("timings", table)
    for table in _supports(shape, np.flatnonzero(audited), slow, rng):
        parts.write("supports", table)
    write_manifest(folder, document | {"finished": now(), "tables": parts.written})
    return folder


def _manifest(shape: Shape) -> dict[str, Any]:
    config = SfiConfig(budget=shape.budget, slow_start=1, trigger_delay=0, min_gap=0).to_dict()
    layer = {"heads": shape.heads, "key_width": 128, "value_width": 128, "itemsize": 2, "window": None}
    layers = [*range(shape.audited_layers)]
    audit = {"every": shape.audit, "top": shape.top, "layers": layers, "heads": None}
    return {
        "preset": None, "schema_version": SCHEMA_VERSION, "created": now(), "finished": None, "stopped": None,
        "redacted": False, "positions": True, "audit": None if shape.audit is None else audit,
        "model": {
            "name": "made-up", "architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "dtype": "bfloat16",
            "layers": [{"layer": at, **layer} for at in range(shape.layers)], "query_heads": 4 * shape.heads,
            "weight_bytes": 8_000_000_000, "embedding_bytes": 800_000_000, "max_positions": 262_144,
            "vocabulary": 150_000,
        },
        "policy": "sfi", "lossless": False, "backend": "triton", "device": "cuda:0", "config": config,
        "trigger_token_ids": [STOP], "prompts": [{"request": 0, "tokens": shape.prompt, "sha256": "0" * 64}],
        "versions": {},
    }  # fmt: skip


def _slow(shape: Shape, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    slow = np.zeros(shape.steps, bool)
    gaps = rng.integers(SENTENCE // 2, SENTENCE * 3 // 2 + 1, shape.steps)
    at = np.concatenate([[0], np.cumsum(np.maximum(1, gaps))])
    slow[at[at < shape.steps]] = True
    return slow, np.cumsum(slow) - 1


def _table(table: str, rows: int, /, **columns: Any) -> pa.Table:
    # columns of the schema; what is not named is null, but for the request
    whole = {"request": np.zeros(rows, np.int32)} | columns
    arrays = []
    for field in TABLES[table]:
        value = whole.get(field.name)
        array = pa.nulls(rows, field.type) if value is None else pa.array(value)
        arrays.append(array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=TABLES[table])


def _steps(
    shape: Shape, slow: np.ndarray, sentence: np.ndarray, ids: np.ndarray, texts: np.ndarray, audited: np.ndarray
) -> pa.Table:
    step = np.arange(shape.steps)
    context = shape.prompt + step
    since = step - np.maximum.accumulate(np.where(slow, step, 0))
    config = SfiConfig()
    attended = np.where(slow, context, config.sink + shape.budget + config.recent + since)
    reason = np.where(step == 0, "first", np.where(slow, "trigger", ""))
    return _table(
        "steps", shape.steps, step=step, position=context - 1, token_id=ids, token_text=texts, slow=slow,
        reason=reason, steps_since_slow=since, sentence=sentence, trigger=ids == STOP,
        attended_tokens=attended.astype(np.float32), context_tokens=context,
        read_ratio=(attended / context).astype(np.float32),
        elapsed_us=np.where(slow, 9000.0, 4500.0) + step % 97,
        audited=audited, batch_step=step, drafted=np.zeros(shape.steps, bool),
    )  # fmt: skip


def _runs(shape: Shape, rows: int, positions: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # [rows, positions] ascending, set after set, and the share of each that was kept: a run in each stretch
    count = positions // RUN
    stretch = (shape.prompt - 64) // count
    begin = 64 + stretch * np.arange(count)
    offset = rng.integers(0, stretch - RUN, (rows, count))
    stays = np.zeros((rows, count), bool)
    while True:
        position = (begin + offset)[:, :, None] + np.arange(RUN)
        yield position.reshape(rows, -1).astype(np.int32), stays.mean(1)
        stays = rng.random((rows, count)) < KEPT
        offset = np.where(stays, offset, rng.integers(0, stretch - RUN, (rows, count)))


def _batches(
    sets: Iterator[tuple[np.ndarray, np.ndarray]], steps: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    # so many steps together: the steps, their sets' positions, and what was kept of each
    for at in range(0, len(steps), size):
        batch = steps[at : at + size]
        position, overlap = zip(*(next(sets) for _ in batch), strict=True)
        yield batch, np.concatenate(position), np.concatenate(overlap)


def _places(shape: Shape, layers: int, steps: np.ndarray) -> dict[str, np.ndarray]:
    step, layer, head = np.meshgrid(steps, np.arange(layers), np.arange(shape.heads), indexing="ij")
    return {"step": step.ravel(), "layer": layer.ravel(), "head": head.ravel()}


def _lists(values: np.ndarray) -> pa.Array:
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))


def _selections(shape: Shape, refreshes: np.ndarray, rng: np.random.Generator) -> Iterator[pa.Table]:
    sets = _runs(shape, shape.layers * shape.heads, shape.budget, rng)
    for steps, position, overlap in _batches(sets, refreshes, TOGETHER):
        rows = len(position)
        moved = np.round((1 - overlap) * shape.budget).astype(np.int32)
        first = np.repeat(steps == 0, shape.layers * shape.heads)
        yield _table(
            "selections", rows, **_places(shape, shape.layers, steps),
            selected=np.full(rows, shape.budget), lambda_star=rng.uniform(0, 0.02, rows).astype(np.float32),
            evidence_entropy=rng.uniform(2, 6, rows).astype(np.float32),
            overlap_previous=pa.array(overlap.astype(np.float32), mask=first),
            jaccard_previous=pa.array((overlap / (2 - overlap)).astype(np.float32), mask=first), added=moved,
            removed=np.where(first, 0, moved), positions=_lists(position), reason=np.full(rows, ""),
        )  # fmt: skip


def _timings(shape: Shape, slow: np.ndarray, rng: np.random.Generator) -> Iterator[pa.Table]:
    for at in range(0, shape.steps, 1000):
        step, layer, name = [], [], []
        for each in range(at, min(at + 1000, shape.steps)):
            kinds = (
                ("append", "attention.dense", "selector", "top_k", "pack")
                if slow[each]
                else ("append", "attention.fast")
            )
            name += ["prefill" if each == 0 else "forward", "sample", *(kinds * shape.layers)]
            layer += [-1, -1, *np.repeat(np.arange(shape.layers), len(kinds)).tolist()]
            step += [each] * (2 + len(kinds) * shape.layers)
        rows = len(step)
        span_us = np.array([ABOUT_US.get(span, 50.0) for span in name]) * rng.uniform(0.9, 1.1, rows)
        whole = np.isin(name, ("prefill", "forward"))
        elapsed = np.where(whole, 4000.0 + 5000.0 * slow[step], span_us)
        yield _table(
            "timings", rows, step=np.array(step), layer=pa.array(layer, mask=np.array(layer) < 0), name=name,
            stream=np.full(rows, "main"), begin_us=np.array(step) * 5000.0, elapsed_us=elapsed,
            bytes=np.full(rows, 1 << 20),
        )  # fmt: skip


def _supports(shape: Shape, audited: np.ndarray, slow: np.ndarray, rng: np.random.Generator) -> Iterator[pa.Table]:
    sets = _runs(shape, shape.audited_layers * shape.heads, shape.top, rng)
    for steps, position, overlap in _batches(sets, audited, 4 * TOGETHER):
        rows = len(position)
        mass = rng.random((rows, shape.top)).astype(np.float32) ** 3
        mass *= 0.9 / mass.sum(1, keepdims=True)
        is_slow = np.repeat(slow[steps], shape.audited_layers * shape.heads)
        read = is_slow[:, None] | (rng.random((rows, shape.top)) < READ)
        yield _table(
            "supports", rows, **_places(shape, shape.audited_layers, steps), positions=_lists(position),
            mass=_lists(mass), retained_mass=np.where(is_slow, 1.0, 0.85).astype(np.float32),
            overlap_last_refresh=overlap.astype(np.float32),
            query_cosine=rng.uniform(0.6, 1, rows).astype(np.float32),
            output_error=np.where(is_slow, 0, 0.05).astype(np.float32), read=_lists(read),
        )  # fmt: skip
