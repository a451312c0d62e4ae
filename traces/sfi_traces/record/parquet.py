"""Records a run as a trace on disk."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

from sfi_core import distributed as torchrun
from sfi_core.distributed.ranks import Ranks
from sfi_core.observers.events import BeginStepEvent, Event, RunEvent
from sfi_core.observers.observer import EVERY_SPAN, NOTHING, SPANS, NullObserver
from sfi_traces.record.folder import claim, describe_run
from sfi_traces.record.rows import TraceRows
from sfi_traces.record.timing import TimingObserver
from sfi_traces.record.writer import Recorded, TraceWriter, tensors_of

PATIENCE = 0.05  # seconds between hand-overs to the thread, which takes time to wake
POSITIONS = 1 << 16  # of one refresh, all layers and heads; beyond, they are off by default


class ParquetObserver(NullObserver):
    """Records the runs it sees, one after the other, as one trace.

    Changes no token and waits for no device: tensors are copied to the host asynchronously, and a background
    thread writes. Decoding waits only while 256 MiB of events are queued. Every rank of a tensor-parallel run
    must have an observer of the same folder: the first rank writes, and the others send it their rows.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Any = None,
        positions: bool | None = None,
        redact_text: bool = False,
        provenance: Mapping[str, Any] | None = None,
        force: bool = False,
        warn: Callable[[str], None] | None = None,
        watch: Callable[[Path], Sequence[str]] | None = None,
        clock: str | None = None,
        spans: bool | None = None,
    ) -> None:
        """Claim the folder; an old trace in it stays until the first run begins.

        Args:
            folder: A new or empty folder, or one with a trace if `force`.
            tokenizer: Gives tokens their text; None records ids only.
            positions: Whether selections record their positions; None: if a refresh has at most 65,536.
            redact_text: Leave out token ids, their text and the prompts' hashes.
            provenance: What only the caller knows, such as preset and seed, in plain values.
            force: Whether to overwrite a trace.
            warn: Called with one line: once if writing fails, and with what `watch` finds. None: a RuntimeWarning.
            watch: Called in the writer's thread with the folder when rows have been written; returns what to warn of.
            clock: The device whose clock times spans; None: the run's.
            spans: Whether to time spans. True: in every step, so that none is replayed as a CUDA graph. None:
                only in steps that are not replayed. False: none.

        Raises:
            ConfigError: The folder may not be overwritten.
            SfiError: The folder cannot be made.
        """
        self._lock = claim(folder, force=force) if torchrun.first() else None
        self._force = force
        self._folder, self._positions, self._redacted = folder, positions, redact_text
        self._tokenizer, self._provenance = tokenizer, provenance or {}
        self._warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2))
        self._watch = watch
        self._waiting: list[Recorded] = []
        self._writer: TraceWriter | None = None
        self._timing: TimingObserver  # the first run names the device
        self._ranks: Ranks  # and the ranks
        self._warned, self._clock, self._not_replayed = False, clock, ""
        self._spans = spans
        if not spans:
            self.wants = type(self).wants - ({EVERY_SPAN} if spans is None else {SPANS, EVERY_SPAN})
        self._due = 0.0

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Close the trace, also after an error."""
        if isinstance(error, KeyboardInterrupt):
            self.close("interrupted")
        else:
            self.close(None if error is None else str(error).partition("\n")[0] or type(error).__name__)

    def close(self, stopped: str | None = None) -> None:
        """Write what is left and finish the trace, with why the run ended early; a second call does nothing."""
        writer = self._writer
        if writer is not None and writer.closed:
            return
        try:
            if writer is not None:
                self._hand_over()
                writer.close(stopped)
        finally:
            if self._lock is not None:  # None on all ranks but the first
                self._lock.release()
            self._report()
        if writer is None and self._lock is not None:
            with suppress(OSError):  # not empty: an old trace, which no run has replaced
                self._folder.rmdir()

    @property
    def failure(self) -> OSError | None:
        """The error that ended the trace before the run; None if all was written."""
        return None if self._writer is None else self._writer.failure

    def on(self, event: Event) -> None:
        """Record an event with its tensors; the first run begins the trace."""
        if isinstance(event, RunEvent):
            if self._writer is None:
                self._writer = self._begin(event)
            assert not self._writer.closed, "the trace is open"
            self._hand_over()
        elif isinstance(event, BeginStepEvent):
            # on several ranks each step, else if `PATIENCE` has passed since the last time
            if self._ranks.size > 1 or time.monotonic() > self._due:
                self._hand_over()
            self._timing.on_begin_step(event)
            if event.not_replayed == self._not_replayed:
                return
            self._not_replayed = event.not_replayed
        self._waiting.append((event, tensors_of(event)))

    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> AbstractContextManager[None]:
        """Time a region."""
        if SPANS not in self.wants:  # with a single observer the engine asks it directly
            return NOTHING
        return self._timing.span(name, layer, moved_bytes)

    def _begin(self, event: RunEvent) -> TraceWriter:
        positions = self._positions
        if positions is None:  # sliding layers and those left dense select nothing
            dense, budget = event.config.get("dense_layers", ()), event.config.get("budget", 0)
            layers = [row for row in event.model["layers"] if row["window"] is None and row["layer"] not in dense]
            positions = bool(sum(row["heads"] for row in layers) * event.ranks * budget <= POSITIONS)
        manifest = describe_run(event, self._provenance, positions=positions, redacted=self._redacted)
        manifest |= {"spans": self._spans}
        if self._lock is None and not event.rank:
            self._lock = claim(self._folder, force=self._force)
        self._ranks = Ranks(event.rank, event.ranks).apart()
        clock = self._clock or event.device
        self._timing = TimingObserver(clock, lambda spans: self._waiting.append((spans, {})))
        offset_us = (time.time_ns() - event.began_unix_ns) / 1e3
        rows = TraceRows(self._tokenizer, positions=positions, redact_text=self._redacted, offset_us=offset_us)
        return TraceWriter(self._folder, rows, manifest, self._watch, self._ranks)

    def _hand_over(self) -> None:
        assert self._writer is not None, "a run has begun"
        self._timing.flush()
        if self._waiting or self._ranks.size > 1:  # the ranks' batches are the same ones
            self._writer.put(self._waiting)
            self._waiting = []
        self._due = time.monotonic() + PATIENCE
        self._report()

    def _report(self) -> None:
        if self.failure is not None and not self._warned:
            self._warned = True
            self._warn(f"trace {self._folder} ends here, the run goes on: {self.failure.strerror}")
        while self._writer is not None and self._writer.warnings:
            self._warn(f"warning: {self._writer.warnings.popleft()}")
