"""Attention in place, in PyTorch: gather the rows, then `sparse_attention`."""

import torch

from sfi_kernels.pages import flat_rows, row_numbers
from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.sparse_attention.reference import sparse_attention


def attention_in_place(
    query_BHGD: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor, key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor, block_table_BP: torch.Tensor, recent_start_B: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend as `sparse_attention` does, to the positions of a packed segment, whose rows need not be packed.

    Arguments as there, but `position_BHS`, positions, and `length_BH`, how many of them count; both int32.

    Returns:
        out, [B, H, G, E], in the query's dtype.
    """
    key_BHSD, value_BHSE = (_rows(pages, position_BHS, block_table_BP) for pages in (key_PHND, value_PHNE))
    return sparse_attention(
        query_BHGD, key_BHSD, value_BHSE, length_BH, key_PHND, value_PHNE, block_table_BP,
        recent_start_B, length_B, scale=scale, soft_cap=soft_cap, sink_HG=sink_HG, pseudo=pseudo,
    )  # fmt: skip


def _rows(pages_PHND: torch.Tensor, position_BHS: torch.Tensor, block_table_BP: torch.Tensor) -> torch.Tensor:
    rows_XD, steps = flat_rows(pages_PHND)
    row_BX = row_numbers(position_BHS, block_table_BP, pages_PHND.shape[2], steps)
    return rows_XD[row_BX].view(*position_BHS.shape, -1)
