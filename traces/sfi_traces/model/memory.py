"""How many tokens the managed memory holds at each step, given the slow steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_core.models.byte_model import ByteModel

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Sizes of a request's memory at N steps from step 0 on.

    Attributes:
        length_N: Cached tokens.
        start_N: First position of the recent segment.
        packed_N: Sink and selected tokens per KV head.
        read_N: Tokens read per KV head in a layer that SFI acts on.
    """

    slow_N: Bools
    length_N: Ints
    sink: int
    start_N: Ints
    packed_N: Ints
    read_N: Ints

    @classmethod
    def of(cls, config: Mapping[str, Any], slow_N: Bools, length_N: Ints) -> Self:
        """Do for all steps what `RequestState` does step by step; `config` is that of a manifest."""
        sink = min(config["sink"], int(length_N[0]))
        fresh_N = np.maximum(sink, length_N - config["recent"])
        last_N = np.maximum.accumulate(np.where(slow_N, np.arange(len(slow_N)), 0))
        start_N = fresh_N if config["recent_mode"] == "sliding" else fresh_N[last_N]
        packed_N = sink + np.minimum(config["budget"], fresh_N[last_N] - sink)
        return cls(
            slow_N=slow_N,
            length_N=length_N,
            sink=sink,
            start_N=start_N,
            packed_N=packed_N,
            read_N=np.where(slow_N, length_N, packed_N + length_N - start_N),
        )

    def bytes_read(self, model: ByteModel) -> npt.NDArray[Any]:
        """Return the bytes read at each step."""
        slow_N = model.slow(self.length_N, self.packed_N)
        return np.where(self.slow_N, slow_N, model.fast(self.length_N, self.read_N))
