"""The steps of a recorded request, and how many tokens its managed memory holds at each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.machine.text import printable
from sfi_core.sizes.step import ByteModel

Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
NO_TOKEN = -1  # a redacted token that is no trigger


@dataclass(frozen=True, slots=True)
class Steps:
    """A request's steps: one value of each kind for each step, in order.

    Attributes:
        token: The generated id; in a redacted trace the first trigger's id for any trigger.
        text: The generated token; "" in a redacted trace.
        reason: Why the step was slow; "" for a fast step.
        attended: Tokens read per KV head; `context` are those that full attention reads.
        audited: Whether the step was audited, which takes time.
        batch_step: The batch's step of which it was part.
        drafted: Whether a lossless run drafted the token, and kept it.
    """

    step: np.ndarray
    token: list[int]
    text: list[str]
    slow: np.ndarray
    reason: list[str]
    sentence: np.ndarray
    attended: np.ndarray
    context: np.ndarray
    elapsed_us: np.ndarray
    audited: np.ndarray
    batch_step: np.ndarray
    drafted: np.ndarray

    @classmethod
    def of(cls, rows: pa.Table, manifest: Mapping[str, Any]) -> Self:
        """Take the steps from rows of the table `steps`, in order."""
        token = rows["token_id"].to_pylist()
        if rows["token_id"].null_count:
            first = next(iter(manifest["trigger_token_ids"]), NO_TOKEN)
            token = [first if trigger else NO_TOKEN for trigger in rows["trigger"].to_pylist()]
        return cls(
            **{name: rows[name].to_numpy() for name in ("step", "slow", "sentence", "elapsed_us")},
            token=token,
            text=[text or "" for text in rows["token_text"].to_pylist()],
            reason=[printable(reason) for reason in rows["reason"].to_pylist()],
            attended=rows["attended_tokens"].to_numpy(),
            context=rows["context_tokens"].to_numpy(),
            audited=pc.fill_null(rows["audited"], False).to_numpy(),
            batch_step=pc.coalesce(rows["batch_step"], rows["step"]).to_numpy(),
            drafted=pc.fill_null(rows["drafted"], False).to_numpy(),
        )

    @property
    def slow_at(self) -> list[int]:
        """The rows of the slow steps."""
        return list(np.flatnonzero(self.slow).tolist())

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.step)

    def rows(self, step: np.ndarray) -> np.ndarray:
        """Find the rows of the steps in `step`."""
        return np.searchsorted(self.step, step)


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
    def of(cls, config: Mapping[str, Any], slow_N: Bools, length_N: Ints, *, scans: bool = False) -> Self:
        """Do for all steps what `RequestState` does step by step, if each selection has the budget's positions.

        `config` is that of a manifest; `scans` says that every step selects, as codescan's do.
        """
        sink = min(config["sink"], int(length_N[0]))
        fresh_N = np.maximum(sink, length_N - config["recent"])
        last_N = np.maximum.accumulate(np.where(slow_N | scans, np.arange(len(slow_N)), 0))
        start_N = fresh_N if config["recent_mode"] == "sliding" else fresh_N[last_N]
        packed_N = sink + np.minimum(config["budget"], fresh_N[last_N] - sink)
        read_N = np.where(slow_N, length_N, packed_N + length_N - start_N)
        return cls(slow_N=slow_N, length_N=length_N, sink=sink, start_N=start_N, packed_N=packed_N, read_N=read_N)

    def bytes_read(self, model: ByteModel) -> npt.NDArray[Any]:
        """Return the bytes read at each step."""
        slow_N = model.slow(self.length_N, self.packed_N)
        return np.where(self.slow_N, slow_N, model.fast(self.length_N, self.read_N))
