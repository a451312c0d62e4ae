"""What really ran in a run, how often, and how long it took."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sfi_core.engine.launches import Launches
from sfi_core.state.kv_store import Recall
from sfi_kernels.launch import counting

WHOLE_STEP = -1  # the layer of what a step does once for all layers


@dataclass(slots=True)
class Meter:
    """The counts and the clock of one run.

    Attributes:
        paths: Attention and maintenance calls by what really ran: requests x layers x steps.
        kernels: Triton kernels launched; `WHOLE_STEP` is no layer.
        prefill_seconds: Wall time of reading prompts, step 0 of every request.
        decode_seconds: Wall time of the other steps.
        not_replayed: Why steps ran one kernel after the other on a device that has CUDA graphs, where nobody
            asked for that; empty for none.
        replayed: Whether the step under way was replayed as a CUDA graph.
        row_bytes: Of a token's keys and values, counted once: in how many layers, in those left dense, in the
            others.
        recalled: Rows that recalls brought from the host's tier, by the bytes of a row, int64, on the device.
        recall_seconds: Time that steps waited for them, where they do not come beside the steps.
        born: When the run was made, by the clock of `time.perf_counter`.
        began: When the step under way began, by the same clock.
        ended: When the last step was over.
    """

    paths: Counter[str] = field(default_factory=Counter)
    kernels: Launches = field(default_factory=Launches)
    not_replayed: str = ""
    replayed: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    row_bytes: tuple[int, int, int] = (0, 0, 0)
    recalled: dict[int, torch.Tensor] = field(default_factory=dict)
    recall_seconds: float = 0.0
    born: float = field(default_factory=time.perf_counter)
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    def count(self, path: str, times: int = 1) -> None:
        """Count calls of a path."""
        self.paths[path] += times

    def count_recall(self, step: int, brought: Recall) -> None:
        """Count what a recall of a decoding step brought; the prompt's belongs to reading the prompt."""
        if step > 0:
            rows, size = brought.rows_RH.sum(), brought.row_bytes
            self.recalled[size] = self.recalled[size] + rows if size in self.recalled else rows
            self.recall_seconds += brought.waited

    @property
    def recalled_bytes(self) -> int:
        """Bytes that recalls brought; waits for the device."""
        return sum(size * int(rows) for size, rows in self.recalled.items())

    @contextmanager
    def launches(self, step: int, layer: int) -> Iterator[None]:
        """Count the Triton kernels launched inside under a step and a layer."""
        launched: Counter[str] = Counter()
        with counting(launched):
            yield
        self.kernels.add(launched, step, layer)

    def begin(self) -> None:
        """Start the clock of a step, which is not replayed as far as is known."""
        self.replayed = False
        self.began = time.perf_counter()

    def begin_with_the_last(self) -> None:
        """Let the step count from the end of the one before it: the device has worked on it since then."""
        self.began = self.ended

    def lap(self, *, prefill: bool) -> float:
        """End the step, and return its seconds."""
        self.ended = time.perf_counter()
        if prefill:
            self.prefill_seconds += self.lasted
        else:
            self.decode_seconds += self.lasted
        return self.lasted

    @property
    def lasted(self) -> float:
        """The seconds of the last step that is over."""
        return self.ended - self.began
