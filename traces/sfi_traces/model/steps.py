"""The steps of a recorded request."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.machine.text import printable


@dataclass(frozen=True, slots=True)
class Steps:
    """A request's steps: one value of each kind for each step, in order.

    Attributes:
        text: The generated token; "" in a redacted trace.
        reason: Why the step was slow; "" for a fast step.
        attended: Tokens read per KV head; `context` are those that full attention reads.
        audited: Whether the step was audited, which takes time.
        batch_step: The batch's step of which it was part.
        drafted: Whether a lossless run drafted the token, and kept it.
    """

    step: np.ndarray
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
    def of(cls, rows: pa.Table) -> Self:
        """Take the steps from rows of the table `steps`, in order."""
        return cls(
            step=rows["step"].to_numpy(),
            text=[text or "" for text in rows["token_text"].to_pylist()],
            slow=rows["slow"].to_numpy(),
            reason=[printable(reason) for reason in rows["reason"].to_pylist()],
            sentence=rows["sentence"].to_numpy(),
            attended=rows["attended_tokens"].to_numpy(),
            context=rows["context_tokens"].to_numpy(),
            elapsed_us=rows["elapsed_us"].to_numpy(),
            audited=pc.fill_null(rows["audited"], False).to_numpy(),
            batch_step=pc.coalesce(rows["batch_step"], rows["step"]).to_numpy(),
            drafted=pc.fill_null(rows["drafted"], False).to_numpy(),
        )

    def rows(self, step: np.ndarray) -> np.ndarray:
        """Find the rows of the steps in `step`."""
        return np.searchsorted(self.step, step)
