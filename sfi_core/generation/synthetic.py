"""A cache filled with random keys and values, for benchmarks of decoding at any context length."""

from collections.abc import Sequence
from typing import Any

import torch

from sfi_core.engine.batch_pass import PromptLayer
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.hosts.transformers.own_layers import held, take_states
from sfi_core.hosts.transformers.session import Session
from sfi_core.hosts.transformers.shapes import cached_layers
from sfi_core.state.kv_store import KVStore
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.two_tier import TwoTierStore

BLOCK = 1024  # random tokens; a longer context repeats them, turned


class SyntheticPrompt:
    """A batch of random prompts, for timing only; `shared` returns it like prompts that were read.

    Keys, values and the queries of the first selection are standard normal; states are those after two tokens.
    Pages on the device, `store`, are filled once for all runs: a run overwrites only the decoded tokens of the run
    before it. A store of two tiers is filled for each run, because decoded tokens overwrite prompt tokens in its
    ring, and each policy divides the cache in its own way.
    """

    def __init__(
        self, contexts: Sequence[int], capacity: int, *, seed: int = 0, rows: Sequence[int] | None = None
    ) -> None:
        """Plan the prompts; `rows` number them for the random generator, by default from 0."""
        self.contexts, self.capacity = list(contexts), capacity
        self.store: KVStore | None = None
        self._seed = seed
        self._rows = list(range(len(self.contexts)) if rows is None else rows)

    def shared(self, session: Session) -> SharedPrompt:
        """Return the prompts for a run of a session; the first call fills the pages."""
        shapes, model = session.shapes(), session.model
        if self.store is None or session.tiers is not None or not self.store.whole_on_device:
            self.drop()  # first, since two stores may not fit
            self.store = self._filled(session, shapes)
        layers = {}
        hosted = session.cache().layers
        read = cached_layers(model, len(self.contexts)) if any(shape.state_bytes for shape in shapes) else hosted
        text = model.config.get_text_config(decoder=True)
        window = min(session.policy.config.window_prefill, *self.contexts)
        for index, shape in enumerate(shapes):
            if shape.window is None:
                size = (shape.heads, text.num_attention_heads // shape.heads, window, shape.key_width)
                query = self._drawn(model, index, size, "query")
                layers[index] = PromptLayer({"scale": shape.key_width**-0.5}, query)
            elif shape.window and shape.owner is None:
                fill_sliding(hosted[index], *self.block(model, index, shape), max(self.contexts))
            if shape.state_bytes:
                take_states(hosted[index], read[index])
        logits_BV = torch.zeros(len(self.contexts), text.vocab_size, device=model.device)
        return SharedPrompt(
            count=self.contexts, capacity=self.capacity, store=self.store, layers=layers, others=held(hosted),
            logits_BV=logits_BV, copied=False,
        )  # fmt: skip

    @property
    def held_bytes(self) -> int:
        """Bytes of the filled store, in the memory of the model's device."""
        if isinstance(self.store, TwoTierStore):
            one_memory = self.store.device.type == "cpu"
            return self.store.device_bytes + (self.store.host_bytes if one_memory else 0)
        if self.store is None:
            return 0
        return sum(tensor.nbytes for layer in self.store.layers for tensor in self.store.pages(layer).tensors)

    def drop(self) -> None:
        """Free the store; the next run fills a new one with the same numbers."""
        self.store = None

    def block(self, model: Any, layer: int, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the keys [B, H, BLOCK, D] and values [B, H, BLOCK, E] that a layer's cache repeats."""
        key = self._drawn(model, layer, (shape.heads, BLOCK, shape.key_width), "key")
        return key, self._drawn(model, layer, (shape.heads, BLOCK, shape.value_width), "value")

    def _filled(self, session: Session, shapes: Sequence[LayerShape]) -> KVStore:
        generated = self.capacity - max(self.contexts)
        store = session.store(len(self.contexts), self.capacity, generated)
        device = session.model.device
        store.layers.owners = {index: shape.owner for index, shape in enumerate(shapes) if shape.owner is not None}
        for index, shape in enumerate(shapes):
            if shape.window is not None or shape.owner is not None:
                continue
            key, value = self.block(session.model, index, shape)
            for start in range(0, max(self.contexts), BLOCK):
                count = [max(0, min(BLOCK, length - start)) for length in self.contexts]
                begin = [min(start, length) for length in self.contexts]
                begin_B, count_B = torch.tensor([begin, count], dtype=torch.int32, device=device)
                piece = [turned(key, start), turned(value, start)]
                if min(count) < BLOCK:
                    # `append` takes a piece's last tokens; roll the first ones there
                    piece = [torch.stack([row.roll(-n, 1) for row, n in zip(x, count, strict=True)]) for x in piece]
                store.append(index, piece[0], piece[1], begin_B, count_B, begin, count)
        return store

    def _drawn(self, model: Any, layer: int, size: tuple[int, ...], what: str) -> torch.Tensor:
        # a request's numbers do not depend on the rest of the batch
        drawn = []
        for row in self._rows:
            generator = torch.Generator(model.device)
            generator.manual_seed(
                ((self._seed * 1009 + row) * 1009 + layer) * 3 + ("key", "value", "query").index(what)
            )
            drawn.append(torch.randn(size, dtype=model.dtype, device=model.device, generator=generator))
        return torch.stack(drawn)


def turned(block: torch.Tensor, start: int) -> torch.Tensor:
    """Return a block's repetition from token `start` on; no two rows are equal up to D blocks."""
    return block.roll(start // BLOCK, 3)


def repeated(block: torch.Tensor, length: int) -> torch.Tensor:
    """Repeat a block [B, H, BLOCK, D] up to `length` tokens, each time turned by a number more."""
    B, H, T, D = block.shape
    out = block.new_empty(B, H, length, D)
    for start in range(0, length, T):
        out[:, :, start : start + T] = turned(block, start)[:, :, : min(T, length - start)]
    return out


def fill_sliding(layer: Any, key: torch.Tensor, value: torch.Tensor, context: int) -> None:
    """Fill transformers' cache layer of a sliding window as if it had read `context` tokens."""
    held = min(layer.sliding_window, context)
    layer.cumulative_length = context - held
    layer.update(repeated(key, held), repeated(value, held))
