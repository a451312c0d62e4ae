"""The Selector in Triton: five launches, or seven where attention did not compute the log-sum-exp."""

from functools import partial

import torch
import triton

from sfi_kernels.launch import KernelLimitError, launch
from sfi_kernels.selector import logit_pass_triton as q
from sfi_kernels.selector.formulas import Gather, exclude_across_heads
from sfi_kernels.selector.logit_pass_triton import _selector_log_sum_kernel, _selector_mean_kernel, _selector_row_kernel
from sfi_kernels.selector.reference import NOTES, check
from sfi_kernels.selector.score_pass_triton import (
    _selector_refine_kernel,
    _selector_score_kernel,
    _selector_sum_kernel,
    _selector_weigh_kernel,
)

BLOCK = 512  # positions of a program, whatever T is: how they are grouped decides the last bits of the sums
CHUNKS = 128  # of a row that are merged at a time, by a thread each
TILE, MIN_POSITIONS = 1024, 32  # elements of a refinement tile, all KV heads of some positions
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def selector(
    logits_BHGWT: torch.Tensor, key_norm_BHT: torch.Tensor, allowed_BT: torch.Tensor | None, *, alpha: float,
    gamma: float, beta: float, power: float, eta: float, lambda_clip: float, alpha_soft: float, radius: int,
    alpha_cross: float, temperature: float, span: int = 0, log_sum_BHGW: torch.Tensor | None = None,
    diagnostics: dict[str, torch.Tensor] | None = None, gather: Gather | None = None,
    interval: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `reference.selector`. T is contiguous in every tensor, and none is float64."""
    check(logits_BHGWT, key_norm_BHT, allowed_BT, log_sum_BHGW, interval, alpha, lambda_clip, temperature, span, radius)
    B, H, G, W, T = logits_BHGWT.shape
    if allowed_BT is None or interval is not None:
        allowed_BT = torch.zeros(B, T, dtype=torch.bool, device=logits_BHGWT.device)
        allowed_BT[:, slice(*(interval or (0, T)))] = True
    _check_layout(logits_BHGWT, key_norm_BHT, allowed_BT, log_sum_BHGW)
    rows, chunks = B * H, triton.cdiv(T, BLOCK)
    empty = partial(torch.empty, dtype=torch.float32, device=logits_BHGWT.device)
    z_BHT, z_adj_BHT = empty(B, H, T), empty(B, H, T)
    partials, sums = empty(q.PARTIALS, rows, chunks), empty(q.SUMS, rows, chunks, dtype=torch.float64)
    merged = empty(q.MERGED, B, H)

    queries = (*logits_BHGWT.stride()[:4], allowed_BT.stride(0), H, W, T)
    pooled = {"LEVELS": (2 * span + 1).bit_length() - 1, "SPAN": span, "BLOCK": BLOCK,
              "WIDE": triton.next_power_of_2(BLOCK + 2 * span)}  # fmt: skip
    if log_sum_BHGW is None or span > 0:
        log_sum_BHGW = empty(B, H, G, W)
        row_sums = empty(2, rows * G * W, chunks)
        launch(
            _selector_row_kernel, (rows * G * W, chunks), logits_BHGWT, allowed_BT, row_sums, *queries, G=G, **pooled
        )
        launch(_selector_log_sum_kernel, (rows * G * W,), row_sums, log_sum_BHGW, chunks, CHUNKS=CHUNKS)
    launch(
        _selector_mean_kernel, (rows, chunks), logits_BHGWT, log_sum_BHGW, allowed_BT, z_BHT,
        partials, *queries, float(alpha), G=G, **pooled,
    )  # fmt: skip
    sizes = (allowed_BT.stride(0), *key_norm_BHT.stride()[:2], H, T)
    formula = [float(value) for value in (alpha, gamma, beta, power, eta)]
    launch(
        _selector_sum_kernel, (rows, chunks), z_BHT, key_norm_BHT, allowed_BT, partials, sums,
        *sizes, *formula, BLOCK=BLOCK, CHUNKS=CHUNKS,
    )  # fmt: skip
    launch(_selector_weigh_kernel, (rows,), partials, sums, merged, chunks, float(lambda_clip), CHUNKS=CHUNKS)
    launch(
        _selector_score_kernel, (rows, chunks), z_BHT, key_norm_BHT, allowed_BT, merged, *sizes, *formula, BLOCK=BLOCK
    )
    heads = triton.next_power_of_2(H)
    block = max(MIN_POSITIONS, TILE // heads)
    # the kernel sees this process' heads only: with others elsewhere it leaves Eqs. 22-23 to what can ask
    alone = float(alpha_cross) if gather is None else 0.0
    launch(
        _selector_refine_kernel, (B, triton.cdiv(T, block)), z_BHT, z_adj_BHT, H, T, radius,
        float(alpha_soft), alone, float(temperature), HEADS=heads, BLOCK=block,
    )  # fmt: skip
    if gather is not None:
        z_adj_BHT = exclude_across_heads(z_adj_BHT, alpha_cross, temperature, gather)
    if diagnostics is not None:
        diagnostics.update(zip(NOTES, merged[q.NORM2.value :], strict=True))
    return z_adj_BHT, merged[q.WEIGHT.value]


def _check_layout(
    logits_BHGWT: torch.Tensor, key_norm_BHT: torch.Tensor, allowed_BT: torch.Tensor, log_sum_BHGW: torch.Tensor | None
) -> None:
    for name, tensor in (("logits", logits_BHGWT), ("key_norm", key_norm_BHT), ("allowed", allowed_BT)):
        if tensor.device != logits_BHGWT.device:
            raise ValueError(f"{name} must be on {logits_BHGWT.device}, got {tensor.device}")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous along T, got strides {tensor.stride()}")
        if tensor.dtype not in DTYPES and tensor is not allowed_BT:
            raise KernelLimitError(
                f"{name} must be float32, float16 or bfloat16 for the kernel, got {tensor.dtype}; use the torch backend"
            )
    if log_sum_BHGW is not None:
        if log_sum_BHGW.device != logits_BHGWT.device:
            raise ValueError(f"log_sum must be on {logits_BHGWT.device}, got {log_sum_BHGW.device}")
        if not log_sum_BHGW.is_contiguous():
            raise ValueError(f"log_sum must be contiguous, got strides {log_sum_BHGW.stride()}")
