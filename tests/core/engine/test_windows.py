"""Attention over rings of pages, beside full attention under the mask of a window or of chunks."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sfi_core.engine.windows import Window, attend_window
from sfi_core.state.window_ring import WindowRing, ring_rows
from sfi_kernels.step_descriptor import FAST, IDLE, SLOW, StepRequest, describe_step
from tests.covering import covering

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H, G, D, LONGEST = 3, 2, 2, 16, 200


def history(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, B, H, LONGEST, D, generator=generator).to(DEVICE)
    return key, value


def last(rows_BHTD: torch.Tensor, lengths: Sequence[int], count: int) -> torch.Tensor:
    """Return each request's last `count` rows, NaN before its first."""
    padded = torch.nn.functional.pad(rows_BHTD, (0, 0, count, 0), value=torch.nan)
    return torch.stack([row[:, length : length + count] for row, length in zip(padded, lengths, strict=True)])


def under_mask(query_BHGTD, key, value, lengths, window: Window, cap: float, sink_HG) -> torch.Tensor:
    position = (
        torch.tensor(lengths, device=DEVICE)[:, None, None]
        - torch.arange(query_BHGTD.shape[3], 0, -1, device=DEVICE)[:, None]
    )  # [B, T, 1]
    token = torch.arange(LONGEST, device=DEVICE)
    seen = token > position - window.size
    if window.chunked:
        seen = token // window.size == position // window.size
    logits = cap * torch.tanh(torch.einsum("bhgtd,bhsd->bhgts", query_BHGTD, key) * D**-0.5 / cap)
    logits = logits.masked_fill(~(seen & (token <= position))[:, None, None], -torch.inf)
    logits = torch.cat([logits, sink_HG[None, :, :, None, None].expand(*logits.shape[:4], 1)], 4)
    return torch.einsum("bhgts,bhse->bhgte", logits.softmax(-1)[..., :-1], value)


@pytest.mark.parametrize(
    ("backend", "window", "queries", "before"),
    covering(
        ["torch", "triton"], [Window(20), Window(20, chunked=True), Window(64), Window(130)], [1, 3],
        [(0, 17, 60), (19, 63, 140), (126, 129, 180)],
    ),
    ids=str,
)  # fmt: skip
def test_a_ring_holds_what_a_query_sees(backend, window, queries, before):
    """Prompts that end behind a token after those `before`; then a draft that is taken back, and two passes."""
    (key, value), sink_HG = history(1), torch.linspace(-1, 1, H * G, device=DEVICE).view(H, G)
    ring, start = None, [length + 1 for length in before]
    counts, modes = [queries, 1, queries], [SLOW, FAST, SLOW if queries > 1 else IDLE]
    once, twice = ([length + passes * count for length, count in zip(start, counts, strict=True)] for passes in (1, 2))
    for draft, lengths in ((True, once), (False, once), (False, twice)):
        step = describe_step(
            [
                StepRequest(mode=mode, length=length, recent_start=0, packed=0, sink=0, count=count)
                for mode, length, count in zip(modes, lengths, counts, strict=True)
            ],
            0, DEVICE,
        )  # fmt: skip
        if ring is None:
            held = min(window.size - 1, max(start))
            tokens = [last(x, start, held).nan_to_num() for x in (key, value)]
            ring = WindowRing(*tokens, ring_rows(window.size, queries, LONGEST), backend)
            ring.fill(*tokens, start, [min(length, held) for length in start])
        run = SimpleNamespace(
            launches=nullcontext, descriptors=SimpleNamespace(windows={}), batch_pass=SimpleNamespace(descriptor=step)
        )
        query = torch.randn(B, H, G, queries, D, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        drafted = [last(x, lengths, queries) for x in (history(3) if draft else (key, value))]
        out = attend_window(run, ring, window, query, drafted, scale=D**-0.5, soft_cap=2.0, sink_HG=sink_HG)
        if draft:
            continue
        expected = under_mask(query, key, value, lengths, window, 2.0, sink_HG)
        for row, (mode, count) in enumerate(zip(modes, counts, strict=True)):
            if mode != IDLE:
                torch.testing.assert_close(out[row, :, :, -count:], expected[row, :, :, -count:])
        held = min(window.size - 1, *lengths)
        for ours, theirs in zip(ring.tokens(lengths, held), (key, value), strict=True):
            torch.testing.assert_close(ours, last(theirs, lengths, held))
