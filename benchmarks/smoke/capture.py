"""Stage 3: a toy step through the product's recorder and second stream, replayed with changed inputs."""

from typing import Any

import torch

from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from sfi_core.engine.graphs import recorder
from sfi_core.state.side_stream import side_of
from sfi_kernels.top_k import top_k

ROWS, WIDTH, KEPT, REPLAYS = 16, 256, 8, 3


class Toy:
    """A matrix product, a Triton kernel on the side, another product beside it, and a join.

    Attributes:
        given: What a step reads; it stays where it is.
        hidden: The first product.
        kept: The best places of each of its rows, found on the side.
        out: The second product.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator, device=device) / WIDTH**0.5
        self.given = torch.zeros(ROWS, WIDTH, device=device)
        self.side = side_of(device, overlap=True)
        self.hidden = self.kept = self.out = self.given

    def step(self) -> None:
        """Do the work once, or have it captured."""
        self.side = self.side.again()  # a graph holds the events of its own
        self.hidden = self.given @ self.weight

        def job() -> None:
            self.kept = top_k.triton(self.hidden[None], KEPT)

        self.side.run(0, job)
        self.out = self.hidden @ self.weight
        self.side.join()

    def errors(self) -> dict[str, Any]:
        """Compare what a replay left behind with the same work, done in plain PyTorch."""
        hidden = self.given @ self.weight
        far = max(
            float((got - expected).abs().max())
            for got, expected in ((self.hidden, hidden), (self.out, hidden @ self.weight))
        )
        same = torch.equal(self.kept, top_k.reference(self.hidden[None], KEPT))
        return {"largest_difference": far, "same_top_k": same, "right": same and far < 1e-3}  # noqa: PLR2004


def replay(journal: Journal, plan: Plan) -> None:
    """Record the toy step, replay it three times with new inputs, and compare."""
    if not plan.graphs:
        journal.note("toy", skipped="--no-graphs")
        return
    toy = Toy(plan.device)
    if plan.dry:
        journal.note("toy", here="no CUDA: the step is run again in place of a replay")
        again = toy.step
    else:
        again = recorder.make_recorder(plan.device)(toy.step)
    for number in range(REPLAYS):
        toy.given.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)))
        again()
        journal.trial(f"replay {number + 1}", toy.errors)
