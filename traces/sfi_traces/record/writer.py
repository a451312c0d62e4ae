"""The background thread that writes part files, so that decoding does not wait for the device or the disk."""

import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import RankLostError
from sfi_core.observers.events import Event
from sfi_core.observers.observer import HANDLERS
from sfi_traces.record.folder import PartFiles, clear, now, write_manifest
from sfi_traces.record.rows import TraceRows

QUEUE_BYTES = 256 << 20
EVENT_BYTES = 512  # estimate for an event without its tensors
PART_BYTES = 64 << 20
SOONEST, LATEST, SHARE = 2.0, 60.0, 0.1  # seconds, seconds, share of the time so far
# the names of each event's tensors; such a name ends with its dimensions
TENSORS = {
    event: [field.name for field in fields(event) if field.name.rpartition("_")[2].isupper()] for event in HANDLERS
}

# tables in which each rank has rows of its own KV heads, or spans; the others are the same on every rank
OF_EVERY_RANK = ("selections", "supports", "timings")
ORDER = ("request", "step", "layer", "head")  # of the rows of several ranks

Recorded = tuple[Any, Mapping[str, torch.Tensor]]  # an event and its tensors by name


class TraceWriter:
    """Writes a trace in a thread of its own.

    Parts of all tables are written together, `steps` last, so that a recorded step has its other rows too:
    when 64 MiB wait, or after a tenth of the run's time so far (at least 2, at most 60 seconds). A killed run
    loses no more than that. `failure` is the OSError that ended writing; later events are dropped. `warnings` has what
    `watch`, called after parts, returned and nobody has taken yet.

    Of several ranks the first writes: after each batch of events, the same on every rank, the others give it their
    rows of `OF_EVERY_RANK`. A rank that is lost, or that ends early, gives no more.
    """

    def __init__(
        self,
        folder: Path,
        rows: TraceRows,
        manifest: dict[str, Any],
        watch: Callable[[Path], Sequence[str]] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Begin a trace in a folder that `claim` has accepted; `rows` is the thread's own from now on."""
        self._ranks, self._writes = ranks, ranks.number == 0
        self.failure: OSError | None = None
        self.closed = False
        self.warnings: deque[str] = deque()
        self._watch = watch if self._writes else None
        self._over = False  # whether the thread has taken END from the queue
        self._error: BaseException | None = None
        self._folder, self._rows, self._manifest = folder, rows, manifest
        self._queue = BytesQueue(QUEUE_BYTES)
        self._began = time.monotonic()
        self._parts = PartFiles(folder, manifest)
        # a daemon, so that a crashing main thread does not wait for it
        self._thread = Thread(target=self._run, name="sfi-trace", daemon=True)
        self._thread.start()

    def put(self, items: Sequence[Recorded]) -> None:
        """Queue some events; waits only for room."""
        if self.failure is None or self._ranks.size > 1:
            self._queue.put(Batch(items))

    def close(self, stopped: str | None) -> None:
        """Write what is left and the final manifest; `stopped` says why the run ended early."""
        self.closed = True
        self._queue.put(END)
        self._thread.join()
        if self._error is not None:
            raise self._error
        if not self._writes:
            return
        if self.failure is not None:
            stopped = f"write failed: {self.failure.strerror}"
        ended = {"finished": now(), "stopped": stopped, "tables": self._parts.written}
        try:
            write_manifest(self._folder, self._manifest | ended)
        except OSError as error:
            self.failure = self.failure or error

    def _run(self) -> None:
        try:
            self._record()
        except OSError as error:
            self.failure = error
        except BaseException as error:  # noqa: BLE001 - `close` raises it in the main thread
            self._error = error
        while not self._over:  # drain the queue, so that neither `put` nor another rank waits forever
            self._over = self._queue.get() is END
            self._join_ranks()

    def _record(self) -> None:
        if self._writes:
            clear(self._folder)
            write_manifest(self._folder, self._manifest)
        due = next_parts(0)
        while True:
            try:
                batch = self._queue.get(timeout=max(0.0, due - self._elapsed()))
            except queue.Empty:
                batch = None
            if batch is not None:
                self._over = batch is END
                batch.give(self._rows)
                self._join_ranks()
            if self._over:
                break
            if self._elapsed() >= due or self._rows.nbytes >= PART_BYTES:
                self._flush()
                self.warnings += self._watch(self._folder) if self._watch else ()
                due = next_parts(self._elapsed())
        self._flush()

    def _join_ranks(self) -> None:
        # give the first rank the others' rows
        buffers = self._rows.tables
        if self._ranks.size > 1:
            tables = {name: buffers[name].take() for name in OF_EVERY_RANK}
            try:
                each = self._ranks.exchange((self._over, tables))
            except RankLostError:  # the model's own thread reports it
                each = [(True, tables)]
            if any(over for over, _ in each):
                self._ranks = ALONE
            for name in OF_EVERY_RANK:
                rows = pa.concat_tables([theirs[name] for _, theirs in each])
                order = [(key, "ascending") for key in ORDER if key in rows.column_names]
                buffers[name].add_table(rows.sort_by(order))
        if not self._writes or self.failure is not None:
            for buffer in buffers.values():
                buffer.take()

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _flush(self) -> None:
        if not self._writes:
            return
        known = {"prompts": self._rows.prompts, "graphs": self._rows.graphs, "not_replayed": self._rows.not_replayed}
        if any(self._manifest[name] != value for name, value in known.items()):
            self._manifest |= known | {"prompts": [dict(prompt) for prompt in self._rows.prompts]}
            write_manifest(self._folder, self._manifest)
        self._parts.flush(self._rows.tables)


def tensors_of(event: Event) -> dict[str, torch.Tensor]:
    """Return an event's tensors by name, a selection's diagnostics among them."""
    tensors = {name: getattr(event, name) for name in TENSORS[type(event)]} | getattr(event, "diagnostics", {})
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class Batch:
    """Events for the thread, their tensors on the way to the host; `nbytes` is its size.

    CUDA tensors are joined by type and copied to pinned memory asynchronously; the caller must not write to
    others before `values`.
    """

    def __init__(self, items: Sequence[Recorded]) -> None:
        self._items = items
        self._tensors = tensors = [tensor for _, named in items for tensor in named.values()]
        self.nbytes = sum(tensor.nbytes for tensor in tensors) + EVENT_BYTES * max(1, len(items))
        self._copies: list[tuple[list[int], torch.Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            if tensor.is_cuda:
                groups[tensor.device, tensor.dtype].append(place)
        for places in groups.values():
            self._copies.append((places, _pinned([tensors[place] for place in places])))
        for device in {device for device, _ in groups}:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def values(self) -> list[npt.NDArray[Any]]:
        """Return the tensors' values in order, once they are on the host; floats as float32."""
        for event in self._events:
            event.synchronize()
        for places, flat in self._copies:
            pieces = torch.split(flat, [self._tensors[place].numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                self._tensors[place] = piece.view(self._tensors[place].shape)
        return [(tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy() for tensor in self._tensors]

    def give(self, rows: TraceRows) -> None:
        """Add the events to the rows."""
        arrays = iter(self.values())
        for event, tensors in self._items:
            rows.take(event, {name: next(arrays) for name in tensors})


def _pinned(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    return host.copy_(flat, non_blocking=True)


END = Batch(())


class BytesQueue(queue.Queue[Batch]):
    """A queue bounded by the bytes in it; a single batch may exceed the bound."""

    _bytes = 0

    def _qsize(self) -> int:
        return self._bytes

    def _put(self, item: Batch) -> None:
        self._bytes += item.nbytes
        super()._put(item)

    def _get(self) -> Batch:
        item = super()._get()
        self._bytes -= item.nbytes
        return item


def next_parts(elapsed: float) -> float:
    """Return when the next parts are due, in seconds since the run began, after parts at `elapsed`."""
    return elapsed + min(max(SOONEST, SHARE * elapsed), LATEST)
