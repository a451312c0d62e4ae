"""What a model's states lose: found by running it on a few tokens, in whatever release of transformers.

Mixers of the Mamba 1 kind begin every pass of several tokens with an empty state, and Zamba 2's give another one than
steps of one token.
"""

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import proxy

import torch

from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.own_layers import states
from sfi_core.hosts.transformers.shapes import probe

# passes of so many tokens each that must leave the same states
EQUAL = {"a prompt in pieces": ((8,), (6, 2)), "a lossless run": ((6, 2), (6, 1, 1))}
PADDING = "padding"


class StateChecks:
    """Refuses what would put wrong numbers into a model's states; tries each once."""

    def __init__(self, session: Any) -> None:
        # a cycle would keep a run's cache until the garbage collector comes by
        self._session, self._model = proxy(session), session.model
        self._tried: dict[str, str] = {}

    def passes(self, asked: str) -> None:
        """Raise `UnsupportedModelError` if what is `asked`, of `EQUAL`, would change a state."""
        if mixer := self._mixer(asked):
            raise UnsupportedModelError(
                f"{asked} does not run with {type(self._model).__name__}: {mixer} computes another state in a pass of "
                "several tokens"
            )

    def padding(self, count: Sequence[int]) -> None:
        """Raise `UnsupportedModelError` if prompts of `count` tokens cannot be padded to a batch."""
        self.positions(count)
        if len(set(count)) > 1 and (mixer := self._mixer(PADDING)):
            self._refuse(count, f"padding enters the state of {mixer}")

    def positions(self, count: Sequence[int]) -> None:
        """Raise `UnsupportedModelError` if requests of `count` tokens cannot have positions of their own."""
        if len(set(count)) > 1 and "position_ids" not in inspect.signature(self._model.forward).parameters:
            self._refuse(count, "it takes no position_ids")

    def _refuse(self, count: Sequence[int], why: str) -> None:
        raise UnsupportedModelError(
            f"{type(self._model).__name__} must have requests of one length together, got {sorted(set(count))}: {why}; "
            "use max_batch=1"
        )

    def _mixer(self, asked: str) -> str:
        # class and layer of the first mixer whose state differs, "" for none
        if asked not in self._tried:
            stated = any(shape.state_bytes for shape in self._session.shapes())
            with self._session.planned():
                self._tried[asked] = self._try(asked) if stated else ""
        return self._tried[asked]

    def _try(self, asked: str) -> str:
        model = self._model
        last = model.config.get_text_config(decoder=True).vocab_size - 1
        far = torch.finfo(model.dtype).eps ** 0.5  # relative: well above rounding
        ids_1T = torch.linspace(0, last, 8, device=model.device).long()[None]
        ways: list[list[tuple[torch.Tensor, torch.Tensor | None]]]
        if asked == PADDING:
            mask_1T = (torch.arange(8, device=model.device) >= 6).long()[None]  # noqa: PLR2004
            ways = [[(ids_1T[:, 6:], None)], [(ids_1T, mask_1T)]]
        else:
            ways = [[(part, None) for part in torch.split(ids_1T, list(sizes), 1)] for sizes in EQUAL[asked]]
        caches = [SfiCache(model, None, None, frozenset()) for _ in ways]
        for cache, passes in zip(caches, ways, strict=True):
            probe(model, cache, *passes)
        for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
            pairs = zip(*(states(layer) for layer in layers), strict=True)
            if any((a - b).float().norm() > far * a.float().norm() for (_, _, a), (_, _, b) in pairs):
                named = [type(one).__name__ for one in model.modules() if getattr(one, "layer_idx", None) == index]
                return f"{named[-1]} of layer {index}" if named else f"layer {index}"
        return ""
