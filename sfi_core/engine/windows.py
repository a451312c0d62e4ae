"""Decoding steps of layers that attend to a sliding window or in chunks, over rings of pages.

Such a layer selects nothing and is no layer of the run: it is neither counted nor watched. A query of a verification is
a row of its own, since each has a window of its own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sfi_core.engine.run import Run
from sfi_core.state.window_ring import WindowRing
from sfi_kernels.compiled import fastest
from sfi_kernels.decode_attention import decode_attention, resident_programs, sparse_attention, split_plan, work_items
from sfi_kernels.step_descriptor import FAST, MODE, StepDescriptor, fast_step

NewRows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Window:
    """What a query sees: the last `size` tokens, its own included; of `chunked` attention those of its chunk."""

    size: int
    chunked: bool = False

    def seen(self, length: torch.Tensor) -> torch.Tensor:
        """Return how many tokens the last of `length` sees."""
        return (length - 1) % self.size + 1 if self.chunked else length.clamp_max(self.size)


class WindowStep(NamedTuple):
    """A pass in rings of one kind: places of the new rows, and by query, X = B * T, what it reads; tensors are int32.

    `step` describes that for Triton; None for torch.
    """

    place_B: torch.Tensor
    count_B: torch.Tensor
    start_X: torch.Tensor
    end_X: torch.Tensor
    table_XP: torch.Tensor
    packed_XH: torch.Tensor
    step: StepDescriptor | None


def attend_window(
    run: Run, ring: WindowRing, window: Window, query_BHGTD: torch.Tensor, new: NewRows | None, **options: Any
) -> torch.Tensor:
    """Append the `new` keys and values [B, H, T, X] of a decoding pass to a ring, None if they are there, and attend.

    A request's own are the last `count` of T, its other outputs undefined. `options` are `scale`, `soft_cap` and
    `sink_HG`. Return the outputs, [B, H, G, T, E]. Nothing is read from the device on Triton.
    """
    B, H, G, T, _ = query_BHGTD.shape
    kind, known = (ring.rows, window, H, T), run.descriptors.windows
    with run.launches():
        if kind not in known:
            known[kind] = _describe(run, ring, window, H, T)
        about: WindowStep = known[kind]
        key, value = ring.pages.key_PHND, ring.pages.value_PHNE
        if new is not None:
            ring.append(*new, about.place_B, about.count_B)
        query_XHGD = query_BHGTD.movedim(3, 1).flatten(0, 1)
        nothing = [page.new_empty(B * T, H, 0, page.shape[3]) for page in (key, value)]
        packed = nothing[0], nothing[1], about.packed_XH
        if about.step is not None:
            query_XHG1D = query_XHGD[:, :, :, None]
            result = decode_attention.triton(query_XHG1D, *packed, key, value, about.table_XP, about.step, **options)
            out_XHGE = result.out_BHGWE[:, :, :, 0]
        else:
            by = fastest(ring.backend, query_BHGTD.device, key, value)
            read = about.table_XP, about.start_X, about.end_X
            out_XHGE = sparse_attention.on(by)(query_XHGD, *packed, key, value, *read, **options)
    return out_XHGE.view(B, T, H, G, -1).movedim(1, 3)


def _describe(run: Run, ring: WindowRing, window: Window, heads: int, queries: int) -> WindowStep:
    # from the pass's own descriptor and on its device, so that a CUDA graph holds it
    whole, device, T = run.batch_pass.descriptor, ring.table_BP.device, queries
    end_B, later_T = ring.end(whole.length_B), torch.arange(T - 1, -1, -1, dtype=torch.int32, device=device)
    end_BT = end_B[:, None] - later_T
    length_BT = (whole.length_B[:, None] - later_T).clamp_min(1)  # padding before a request's first token reads a row
    start_X, end_X = (end_BT - window.seen(length_BT)).flatten(), end_BT.flatten()
    step = None
    if ring.backend == "triton":
        programs = resident_programs(device)
        step = fast_step(start_X, end_X, work_items(len(end_X), heads, programs))
        idle_or_fast_B = whole.table_BX[:, MODE].clamp_max(FAST)
        step.table_BX.view(-1, T, step.table_BX.shape[1])[:, :, MODE] = idle_or_fast_B[:, None]
        split_plan.triton(step, heads, programs)
    return WindowStep(
        place_B=end_B - whole.append_count_B, count_B=whole.append_count_B, start_X=start_X, end_X=end_X,
        table_XP=ring.table_BP[:, None].expand(-1, T, -1).flatten(0, 1), packed_XH=end_X.new_zeros(len(end_X), heads),
        step=step,
    )  # fmt: skip
