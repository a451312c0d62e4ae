"""Split-KV decoding attention in Triton: one launch for fast and slow requests, then a join."""

import math

import torch

from sfi_kernels.attention_tile import REGISTERS, SEVERAL, padded, parts_of_pass, tile_shape
from sfi_kernels.decode_attention.join_triton import _join_splits_kernel as join_splits
from sfi_kernels.decode_attention.reference import DecodeAttention, check
from sfi_kernels.decode_attention.split_triton import _split_attention_kernel as split_attention
from sfi_kernels.launch import launch, target
from sfi_kernels.pages import kernel_strides
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.split_plan.reference import MAX_SPLITS
from sfi_kernels.step_descriptor import StepDescriptor

PAGE_IDS = 256  # page numbers a program holds at once
JOINED = MAX_SPLITS  # partial results that a program of the join holds at once: all of a request's


def decode_attention(
    query_BHGWD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, descriptor: StepDescriptor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, evidence: bool = False,
    into: torch.Tensor | None = None,
    dense_BH: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None, block_n: int | None = None,
) -> DecodeAttention:  # fmt: skip
    """See `reference.decode_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens.

    The kernel benchmark asks for tiles of `block_n` keys; None takes ours.
    """
    check(query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE,
          block_table_BP, descriptor, sink_HG, dense_BH, pseudo, position_BHS)  # fmt: skip
    B, H, G, W, D = query_BHGWD.shape
    S = (packed_key_BHSD if position_BHS is None else position_BHS).shape[2]
    page_size, E = key_PHND.shape[2], value_PHNE.shape[3]
    chip, items = target(query_BHGWD.device), descriptor.work_XI.shape[0]
    tile = tile_shape(key_PHND, value_PHNE, page_size, chip)
    key_strides, value_strides = (
        kernel_strides(pages, name) for pages, name in ((key_PHND, "key"), (value_PHNE, "value"))
    )
    query_BHGWD, keeps = query_BHGWD.contiguous(), evidence and descriptor.slow_rows > 0

    # no program writes the padding of a pass with several queries
    make_out = query_BHGWD.new_empty if W == 1 else query_BHGWD.new_zeros
    out_BHGWE = make_out(B, H, G, W, E)
    part = query_BHGWD.new_empty(items, H, G, W, E, dtype=torch.float32)
    lse = query_BHGWD.new_empty(items, H, G, W, dtype=torch.float32)
    sums = logits = log_sum = lse
    if keeps:
        sums = torch.empty_like(lse)
        logits, log_sum = _evidence_room(lse, descriptor, into)
        if dense_BH is not None:
            logits.fill_(-torch.inf)  # the kernel leaves those of a mixed request's sparse heads

    table, sink = descriptor.table_BX, lse if sink_HG is None else sink_HG.float().contiguous()
    pseudo_operands: tuple[torch.Tensor, ...] = (lse, lse)
    pseudo_parts = 1
    if pseudo is not None:
        pseudo_parts = pseudo.logit_BHG[0, 0, 0].numel()
        pseudo_operands = tuple(part.float().contiguous() for part in pseudo)
    common = {"H": H, "G": G, "E": E, "BLOCK_E": tile.value_width, "SINKS": sink_HG is not None, "SLOW": keeps}
    for part_of_pass in parts_of_pass(G, W, tile, chip, full=key_PHND.dtype == torch.float32):
        own, one = part_of_pass.tile, part_of_pass.kind != SEVERAL
        launch(
            split_attention, (items * part_of_pass.tiles, H),
            query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH,
            packed_length_BH if dense_BH is None else dense_BH,
            packed_length_BH if position_BHS is None else position_BHS,
            key_PHND, value_PHNE, block_table_BP, table, descriptor.work_XI, sink,
            *pseudo_operands, out_BHGWE, part, lse, logits, sums, scale, soft_cap or 1.0, S,
            block_table_BP.shape[1], descriptor.longest, W, pseudo_parts,
            KEY_STRIDES=key_strides, VALUE_STRIDES=value_strides,
            D=D, PAGE=page_size, BLOCK_M=own.rows, BLOCK_J=padded(G),
            BLOCK_N=block_n or own.tokens, BLOCK_D=tile.key_width, IDS=PAGE_IDS,
            CAPPED=soft_cap is not None, KIND=part_of_pass.kind,
            # what a request with several queries does not have
            GATHER=one and position_BHS is not None, HEADS=one and dense_BH is not None,
            PSEUDO=one and pseudo is not None, **common,
            num_warps=own.warps, num_stages=own.stages, max_registers=own.registers,
        )  # fmt: skip
    launch(
        join_splits, (B, H, G * W), table, sink, *pseudo_operands, out_BHGWE, part, lse, sums,
        log_sum, W, pseudo_parts, PSEUDO=pseudo is not None, SEVERAL=W > 1, **common,
        TILE=JOINED, max_registers=REGISTERS,
    )  # fmt: skip
    return DecodeAttention(out_BHGWE, logits if keeps else None, log_sum if keeps else None)


def _evidence_room(
    lse: torch.Tensor, descriptor: StepDescriptor, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    # for the slow requests' logits, and their log-sum-exp over J
    _, H, G, _ = lse.shape
    shape = (descriptor.slow_rows, H, G, 1, descriptor.longest)
    logits = lse.new_empty(shape) if into is None else into[: math.prod(shape)].view(shape)
    return logits, lse.new_empty(shape[:4])
