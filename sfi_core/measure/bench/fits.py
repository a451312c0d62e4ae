"""Memory that a variant needs at a point, known before it is allocated."""

from collections.abc import Sequence
from typing import Any

from sfi_core.hosts.transformers.replays import records_steps
from sfi_core.hosts.transformers.shapes import cached_shapes
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.machine.memory import free_bytes
from sfi_core.measure.bench.settings import DecodeSettings, DecodeVariant, Point
from sfi_core.measure.bench.theirs import STATIC
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.memory import Forecast, largest_batch
from sfi_core.state.layer_shape import LayerShape

# bytes for each token of the vocabulary: logits, scores and a copy of the scores, in float32
LOGITS = 3 * 4


def needed_bytes(model: Any, variant: DecodeVariant, point: Point, settings: DecodeSettings, config: SfiConfig) -> int:
    """Return the bytes that a variant needs besides the model, which is outside `slow_fast`."""
    capacity = settings.capacity(point.context)
    if not variant.policy:
        return _theirs(model, variant.name, cached_shapes(model), point, capacity, settings)
    with session_on(model, None, config, policy=variant.policy, engine=variant.engine) as session:
        prompt = point.context if settings.prefill else 1
        chunk = settings.engine.prefill_chunk if settings.prefill else 0
        expected: Forecast = session.forecast(point.batch, prompt, capacity, chunk, graphs=records_steps(session))
        return expected.needed_bytes


def sort_out(
    model: Any, variants: Sequence[DecodeVariant], point: Point, settings: DecodeSettings, config: SfiConfig
) -> tuple[dict[DecodeVariant, int], list[dict[str, Any]]]:
    """Return the needed bytes of each variant that fits into memory, and a row for each other variant.

    Call it before a cache is allocated. `config` has the settings that the policies run with.
    """
    free = free_bytes(model.device)
    fitting: dict[DecodeVariant, int] = {}
    rows: list[dict[str, Any]] = []
    for variant in variants:

        def needs(batch: int, variant: DecodeVariant = variant) -> int:
            smaller = Point(point.context, batch, point.ragged)
            return needed_bytes(model, variant, smaller, settings, config)

        needed = needs(point.batch)
        if free is None or needed <= free:
            fitting[variant] = needed
            continue
        largest = largest_batch(needs, point.batch - 1, free)
        row = {"policy": variant.name, "context": point.context, "batch": point.batch}
        rows.append(row | {"needed_bytes": needed, "free_bytes": free, "largest_batch": largest})
    return fitting, rows


def _theirs(
    model: Any, name: str, shapes: Sequence[LayerShape], point: Point, capacity: int, settings: DecodeSettings
) -> int:
    text = model.config.get_text_config(decoder=True)
    sizes = [shape.row_bytes * min(shape.window or capacity, capacity) + shape.state_bytes for shape in shapes]
    largest = max(sizes)
    group = text.num_attention_heads / min(shape.heads for shape in shapes if shape.heads)
    # a masked step repeats a layer's keys and values for all query heads; a growing cache copies a layer
    repeats = largest * group if name == STATIC or point.ragged or settings.prefill else 0
    grown = 0 if name == STATIC else largest
    read = point.context if settings.prefill else 1
    widest: int = 4 * (text.hidden_size + (getattr(text, "intermediate_size", 0) or 0))
    activations = widest * read * model.dtype.itemsize
    # the mask of a prompt is read x capacity; only the last token has logits
    mask = read * capacity * model.dtype.itemsize if settings.prefill else 0
    each = sum(sizes) + repeats + grown + activations + LOGITS * text.vocab_size + mask
    return int(point.batch * each)
