"""What progress shows of a run."""

from typing import Any

import pytest
import torch

import sfi_core
from sfi_cli.terminal.progress import ProgressObserver
from sfi_core import SfiConfig
from tests.core.conftest import tiny_qwen3

CONFIG = SfiConfig(sink=2, recent=6, budget=5, trigger_token_ids=(1,))


class Shown:
    """Keeps what it is told to show."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.counts: list[tuple[int, int, int]] = []

    def update(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def requests(self, done: int, running: int, waiting: int) -> None:
        self.counts.append((done, running, waiting))


def shown(limits: list[int], **options: Any) -> Shown:
    progress = Shown()
    sfi_core.generate(
        tiny_qwen3(), None, [[5, 6, 7]] * len(limits), CONFIG, max_new_tokens=limits,
        stop_token_ids=(), observers=[ProgressObserver(progress, max(limits))], **options,
    )  # fmt: skip
    return progress


def test_a_file_shows_how_many_are_done_running_and_waiting():
    """Of five, two at a time: 1 ends first, 2 with its first token, then 0 and 3 together."""
    progress = shown([4, 2, 1, 3, 2], max_batch=2)
    assert progress.steps == []
    assert progress.counts == [(0, 2, 3), (2, 2, 1), (2, 2, 1), (4, 1, 0)]


@pytest.mark.parametrize("max_batch", [1, 3])
def test_the_counts_add_up(max_batch):
    torch.manual_seed(0)
    limits = torch.randint(1, 6, (9,)).tolist()
    for done, running, waiting in shown(limits, max_batch=max_batch).counts:
        assert done + running + waiting == 9
        assert 0 < running <= max_batch
