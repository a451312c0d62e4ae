"""Whole decoding steps as CUDA graphs: how one is recorded, and which runs can."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from sfi_core.errors import BackendError, ConfigError, SfiError
from sfi_core.observers.observer import hears

if TYPE_CHECKING:
    from sfi_core.hosts.transformers.session import Session

Work = Callable[[], None]


class Recorder(Protocol):
    """Records what some work asks of the device."""

    def __call__(self, work: Work) -> Work:
        """Do the work, at least once, and return what does the device's part of it again.

        Raises:
            BackendError: It waits for the device; the work has been done.
        """


class CudaRecorder:
    """Records CUDA graphs, all of one run in one memory pool: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # what gives way to this one's kernels is on the side's stream, of the lowest priority
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """See `Recorder`."""
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            work()  # compiles every kernel, and makes what libraries keep for later
            with refuse_waiting():
                work()
        outer.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads, an observer's, may wait for their own events meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


@contextmanager
def refuse_waiting() -> Iterator[None]:
    """Refuse what waits for the device inside, which no graph can hold.

    Raises:
        BackendError: Something does.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise BackendError(
            "a decoding step must not wait for the device to run as a CUDA graph, but the model does; "
            "use --no-graphs"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def recorder_of(session: "Session") -> Recorder | None:
    """Return what records the decoding steps of a session's runs; None where they run one by one.

    Raises:
        BackendError: Graphs were asked for and the device or the backend has none.
        ConfigError: Graphs were asked for and the run asks for something that they cannot do.
    """
    wanted = session.engine.graphs
    if wanted is False:
        return None
    refusal = _refusal(session)
    if refusal is None:
        return make_recorder(session.model.device)
    if wanted:
        raise refusal
    return None


def make_recorder(device: torch.device) -> Recorder:
    """Return a recorder for a device."""
    return CudaRecorder(device)


def can_record(device: torch.device) -> bool:
    """Say whether a device has graphs."""
    return device.type == "cuda"


def _refusal(session: "Session") -> SfiError | None:
    device, policy = session.model.device, session.policy
    if not can_record(device):
        return BackendError(f"CUDA graphs need a CUDA device, got {device.type}; use --no-graphs")
    if session.backend != "triton":
        return BackendError(
            f"CUDA graphs need the triton backend, got {session.backend}; use --no-graphs"
        )
    reasons = {
        f"policy {session.policy_name}, which selects at fast steps": policy.selects_before
        or policy.observes_fast,
        f"policy {session.policy_name}, which selects with more than the evidence": (
            policy.selects_after and not policy.selects_apart
        ),
        f"a trigger that looks at the {policy.signal}": bool(policy.signal),
        "an audit": session.audit is not None,
        "layers of sliding windows, whose cache moves": any(
            shape.window is not None for shape in session.shapes()
        ),
        "spans inside the step, as a trace has": hears(session.observer, "span"),
    }
    for reason, holds in reasons.items():
        if holds:
            return ConfigError(f"CUDA graphs must be off with {reason}; use --no-graphs")
    return None
