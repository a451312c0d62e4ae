"""Split-KV decoding attention in Triton: fast and slow requests in one launch, then a join."""

import math

import torch

from sfi_kernels.attention_tile.shape import padded, tile_shape
from sfi_kernels.decode_attention.join_triton import _join_splits_kernel as join_splits
from sfi_kernels.decode_attention.reference import DecodeAttention, check
from sfi_kernels.decode_attention.split_triton import _split_attention_kernel as split_attention
from sfi_kernels.launch import launch, target
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.split_plan.reference import MAX_SPLITS
from sfi_kernels.step_descriptor import StepDescriptor

PAGE_IDS = 256  # page numbers a program holds at once
JOINED = MAX_SPLITS  # partial results that a program of the join holds at once: all of a request's
# of a thread, without spills; left alone, the compiler spills for more programs. Two split programs of
# 128 threads fit a processor with either, as many as shared memory allows. Half precision leaves 12,288
# registers beside them, enough for a program of the Selector, of top-k's counts or of pack; float32 has
# twice the threads.
REGISTERS, HALF_REGISTERS = 255, 208


def decode_attention(
    query_BHGD: torch.Tensor,
    packed_key_BHSD: torch.Tensor,
    packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    descriptor: StepDescriptor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
    evidence: bool = False,
    into: torch.Tensor | None = None,
    dense_BH: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None,
) -> DecodeAttention:
    """See `reference.decode_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens."""
    return attend(
        query_BHGD,
        packed_key_BHSD,
        packed_value_BHSE,
        packed_length_BH,
        key_PHND,
        value_PHNE,
        block_table_BP,
        descriptor,
        scale=scale,
        soft_cap=soft_cap,
        sink_HG=sink_HG,
        evidence=evidence,
        into=into,
        dense_BH=dense_BH,
        pseudo=pseudo,
    )


def attend(
    query_BHGD: torch.Tensor,
    packed_key_BHSD: torch.Tensor,
    packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    descriptor: StepDescriptor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
    evidence: bool = False,
    into: torch.Tensor | None = None,
    dense_BH: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None,
    block_n: int | None = None,
    position_BHS: torch.Tensor | None = None,
) -> DecodeAttention:
    """Run `decode_attention`, or one of the variants that the kernel benchmark compares it with.

    Args beyond those of `reference.decode_attention`:
        block_n: Keys of a tile; None is ours.
        position_BHS: Positions of the packed rows: read these from the pages, and no packed row at all.
    """
    check(query_BHGD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE,
          block_table_BP, descriptor, sink_HG, dense_BH, pseudo)  # fmt: skip
    B, H, G, D = query_BHGD.shape
    S, page_size, E = packed_key_BHSD.shape[2], key_PHND.shape[2], value_PHNE.shape[3]
    tile = tile_shape(key_PHND, value_PHNE, page_size, target(query_BHGD.device))
    items, slow = descriptor.work_XI.shape[0], descriptor.slow_rows
    query_BHGD, full = query_BHGD.contiguous(), key_PHND.dtype == torch.float32

    keeps = evidence and slow > 0
    out_BHGE = query_BHGD.new_empty(B, H, G, E)
    part = query_BHGD.new_empty(items, H, G, E, dtype=torch.float32)
    lse = query_BHGD.new_empty(items, H, G, dtype=torch.float32)
    sums = torch.empty_like(lse) if keeps else lse
    logits = log_sum = lse
    if keeps:
        shape = (slow, H, G, 1, descriptor.longest)
        logits = lse.new_empty(shape) if into is None else into[: math.prod(shape)].view(shape)
        if dense_BH is not None:
            logits.fill_(-torch.inf)  # the kernel leaves those of a mixed request's sparse heads
        log_sum = lse.new_empty(slow, H, G, 1)

    table, sink = descriptor.table_BX, lse if sink_HG is None else sink_HG.float().contiguous()
    pseudo_operands: tuple[torch.Tensor, ...] = (lse, lse)
    if pseudo is not None:
        pseudo_operands = tuple(part.float().contiguous() for part in pseudo)
    common = {
        "H": H, "G": G, "E": E, "BLOCK_E": tile.value_width,
        "SINKS": sink_HG is not None, "PSEUDO": pseudo is not None, "SLOW": keeps,
    }  # fmt: skip
    launch(
        split_attention, (items, H),
        query_BHGD, packed_key_BHSD, packed_value_BHSE, packed_length_BH,
        packed_length_BH if dense_BH is None else dense_BH,
        packed_length_BH if position_BHS is None else position_BHS,
        key_PHND, value_PHNE, block_table_BP, table, descriptor.work_XI, sink,
        *pseudo_operands, out_BHGE, part, lse, logits, sums, scale, soft_cap or 1.0, S,
        block_table_BP.shape[1], descriptor.longest,
        D=D, PAGE=page_size, BLOCK_M=padded(G), BLOCK_N=block_n or tile.tokens,
        BLOCK_D=tile.key_width, IDS=PAGE_IDS,
        CAPPED=soft_cap is not None, GATHER=position_BHS is not None,
        HEADS=dense_BH is not None, **common,
        # float32 products run in registers, which need more threads
        num_warps=8 if full else 4, num_stages=tile.stages,
        max_registers=REGISTERS if full else HALF_REGISTERS,
    )  # fmt: skip
    launch(
        join_splits, (B, H, G), table, sink, *pseudo_operands, out_BHGE, part, lse, sums, log_sum,
        **common, TILE=JOINED, max_registers=REGISTERS,
    )  # fmt: skip
    return DecodeAttention(out_BHGE, logits if keeps else None, log_sum if keeps else None)
