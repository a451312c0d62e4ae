"""Eqs. 22-23 over heads that lie in several processes: what each sees of the others is enough."""

from collections.abc import Callable

import pytest
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.selector import exclude_across_heads, selector

SETTINGS = {
    "alpha": 0.5, "gamma": 0.5, "beta": 0.5, "power": 1.8, "eta": 0.4, "lambda_clip": 0.02,
    "alpha_soft": 0.5, "radius": 16, "alpha_cross": 0.35, "temperature": 2.0,
}  # fmt: skip
Gather = Callable[[torch.Tensor], torch.Tensor]


def apart(parts: int, run: Callable[[int, Gather], torch.Tensor]) -> torch.Tensor:
    """Run every part of the heads with a gather that answers as the others would; join the results."""
    told: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        told.append(tensor)
        return tensor[None]

    for part in range(parts):
        run(part, note)
    assert len(told) == parts  # one call each, whatever the heads
    return torch.cat([run(part, lambda _: torch.stack(told[:parts])) for part in range(parts)], 1)


@pytest.mark.parametrize("temperature", [2.0, 0.1, 1e-6])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_heads_apart_compete_as_heads_together(parts, temperature):
    score_BHT = torch.randn(2, 4, 50) * 5
    score_BHT[1, :, 30:] = MASKED_SCORE
    whole = exclude_across_heads(score_BHT, 0.35, temperature)
    pieces = score_BHT.chunk(parts, 1)
    split = apart(parts, lambda p, gather: exclude_across_heads(pieces[p], 0.35, temperature, gather))
    torch.testing.assert_close(split, whole)


def test_nothing_is_asked_without_exclusivity():
    def nobody(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    score_BHT = torch.randn(1, 2, 5)
    assert exclude_across_heads(score_BHT, 0.0, 2.0, nobody) is score_BHT


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_selector_scores_heads_apart_as_heads_together(backend, kernel_device):
    if backend == "triton":
        pytest.importorskip("triton")
    logits = (torch.randn(2, 4, 2, 1, 40) * 3).to(kernel_device)
    norm = (torch.rand(2, 4, 40) + 0.5).to(kernel_device)
    allowed = (torch.arange(40) < torch.tensor([[36], [20]])).to(kernel_device)
    score = selector.on(backend)
    whole, _ = score(logits, norm, allowed, **SETTINGS)

    def part(index: int, gather: Gather) -> torch.Tensor:
        ours = slice(2 * index, 2 * index + 2)
        args = (logits[:, ours].contiguous(), norm[:, ours].contiguous(), allowed)
        return score(*args, gather=gather, **SETTINGS)[0]

    torch.testing.assert_close(apart(2, part), whole)
