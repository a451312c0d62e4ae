"""Graphs on a device that has none: a recorded step is run again in place of a replay."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.smoke.plan import Plan
from sfi_core.engine.graphs import recorder
from sfi_core.engine.graphs.recorder import Recorder, Work


class Kept:
    """Records as another recorder does, and keeps what was recorded.

    Attributes:
        captured: What replays each step, in the order of recording.
        seconds: What recording each took.
    """

    def __init__(self) -> None:
        self.captured: list[Work] = []
        self.seconds: list[float] = []
        self.inner: Recorder = run_again

    def __call__(self, work: Work) -> Work:
        """See `Recorder`."""
        began = time.perf_counter()
        replay = self.inner(work)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)
        self.captured.append(replay)
        return replay


def run_again(work: Work) -> Work:
    """Run a step of `StepGraphs`, and run it again for every replay."""
    work()
    return work


@contextmanager
def kept_graphs(plan: Plan) -> Iterator[Kept]:
    """Keep the graphs that are recorded inside; without CUDA, stand in for them."""
    graphs = Kept()
    make: Callable[[torch.device], Recorder] = recorder.make_recorder

    def made(device: torch.device) -> Recorder:
        graphs.inner = run_again if plan.dry else make(device)
        return graphs

    with patch.object(recorder, "make_recorder", made), patch.object(recorder, "can_record", lambda _: True):
        yield graphs
