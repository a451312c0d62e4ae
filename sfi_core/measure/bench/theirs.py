"""A run of transformers' `generate`, with its dynamic or its static cache."""

import time
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from sfi_core.generation.synthetic import SyntheticPrompt, fill_sliding, repeated, turned
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.hosts.transformers.own_layers import of_own_kind, take_states
from sfi_core.hosts.transformers.shapes import cached_layers, cached_shapes
from sfi_core.machine.memory import peak_bytes, reset_peak
from sfi_core.measure.bench.runs import BenchRow, DecodeSample, Read
from sfi_core.measure.bench.settings import DecodeSettings, Point

STATIC = "transformers-static"
LOGITS = 3 * 4  # bytes for each token of the vocabulary: logits, scores and a copy of the scores, in float32


class StepClock:
    """A streamer that notes the time when each step's tokens arrive."""

    def __init__(self, row: BenchRow, sample: DecodeSample) -> None:
        self._row, self._sample = row, sample
        self._began = False

    def put(self, value: torch.Tensor) -> None:
        """Note the time; the first call has the prompt."""
        now, sample = time.perf_counter(), self._sample
        if not self._began:
            self._began = True
            return
        if sample.at:
            lengths = [context + len(sample.at) for context in self._row.point.contexts]
            sample.reads.append([Read(True, length, length, 0) for length in lengths])
        sample.at.append(now)
        limit, warmed = self._row.settings.time_limit, len(sample.at) - 1
        if limit is not None and 0 < warmed < sample.warm_up and now - sample.at[0] > limit:
            sample.warm_up = warmed  # it has taken too long already
        self._row.on_step(sample)

    def end(self) -> None:
        """Nothing to finish."""


@torch.no_grad()
def run_theirs(row: BenchRow) -> DecodeSample:
    """Decode greedily with `model.generate`, with its own attention and compilation."""
    model, settings, prompts = row.model, row.settings, row.prompts
    sample = DecodeSample(row.point.batch, settings.warm_up)
    reset_peak(model.device)
    text, static = model.config.get_text_config(decoder=True), row.variant.name == STATIC
    capacity = settings.capacity(row.point.context)
    cache = StaticCache(config=text, max_cache_len=capacity) if static else DynamicCache(config=text)
    cache = of_own_kind(cache, model)
    # all but the last token, which step 0 reads, as in our runs
    _fill(model, cache, prompts.made_up, row.point.context - 1)

    def late(ids_BT: torch.Tensor, _: Any) -> torch.Tensor:
        return torch.full((len(ids_BT),), sample.over(settings.time_limit), device=ids_BT.device)

    given = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    try:
        model.generate(
            prompts.ids_BT,
            attention_mask=prompts.mask_BT,
            max_new_tokens=settings.total_steps + 1,
            streamer=StepClock(row, sample),
            stopping_criteria=[late],
            **{CACHE_NAME: cache},
        )
    finally:
        model.generation_config = given
    sample.peak_bytes = peak_bytes(model.device)
    return sample


def needed_bytes(model: Any, name: str, point: Point, settings: DecodeSettings) -> int:
    """Return the bytes that a run of transformers needs besides the model; `name` is one of `BASELINES`."""
    shapes, capacity = cached_shapes(model), settings.capacity(point.context)
    text = model.config.get_text_config(decoder=True)
    sizes = [shape.row_bytes * min(shape.window or capacity, capacity) + shape.state_bytes for shape in shapes]
    largest = max(sizes)
    group = text.num_attention_heads / min(shape.heads for shape in shapes if shape.heads)
    # a masked step repeats a layer's keys and values for all query heads; a growing cache copies a layer
    repeats = largest * group if name == STATIC or point.ragged else 0
    grown = 0 if name == STATIC else largest
    widest: int = 4 * (text.hidden_size + (getattr(text, "intermediate_size", 0) or 0))
    each = sum(sizes) + repeats + grown + widest * model.dtype.itemsize + LOGITS * text.vocab_size
    return int(point.batch * each)


def _fill(model: Any, cache: Any, made_up: SyntheticPrompt, context: int) -> None:
    read = cached_layers(model, len(made_up.contexts))
    for index, shape in enumerate(cached_shapes(model)):
        layer = cache.layers[index]
        take_states(layer, read[index])
        if not shape.heads:
            continue
        key, value = made_up.block(model, index, shape)
        if isinstance(cache, DynamicCache):
            if shape.window is not None:
                fill_sliding(layer, key, value, context)
            else:
                layer.lazy_initialization(key, value)
                layer.keys, layer.values = repeated(key, context), repeated(value, context)
            continue
        held = min(context, layer.max_cache_len)
        for start in range(0, held, key.shape[2]):
            size = min(key.shape[2], held - start)
            layer.update(*(turned(block, start)[:, :, :size] for block in (key, value)))
        if shape.window is not None:
            layer.cumulative_length_int = context
