"""Two-segment attention in PyTorch (Sec. 4.2)."""

from typing import Any

import torch

from sfi_kernels.pages import flat_rows, read_pages, row_numbers
from sfi_kernels.partial_attention import combine, partial_attention
from sfi_kernels.pseudo_token import PseudoToken


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend to sink and selected tokens, packed or by position, and to the recent tokens, in the pages.

    Arguments as in `decode_attention`, but `recent_start_B`, the first position of the recent segment, where
    no packed token lies, and `length_B`, cached tokens, the query's own included; both int32. numba's loops need
    `position_BHS`, and pages that are `numpy_views.readable`.

    Returns:
        out, [B, H, G, E], in the query's dtype.
    """
    if position_BHS is not None:
        packed_key_BHSD, packed_value_BHSE = (
            _rows(pages, position_BHS, block_table_BP) for pages in (key_PHND, value_PHNE)
        )
    packed = packed_length_BH.tolist()
    if len({length for row in packed for length in row}) > 1 < len(packed):
        rows = [slice(row, row + 1) for row in range(len(packed))]
        return torch.cat(
            [
                sparse_attention(
                    query_BHGD[row], packed_key_BHSD[row], packed_value_BHSE[row],
                    packed_length_BH[row], key_PHND, value_PHNE, block_table_BP[row],
                    recent_start_B[row], length_B[row],
                    scale=scale, soft_cap=soft_cap, sink_HG=sink_HG,
                    pseudo=None if pseudo is None else pseudo.of(row),
                )
                for row in rows
            ]
        )  # fmt: skip
    query_BHG1D = query_BHGD[:, :, :, None]
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    parts = []
    if most := max(packed[0]):
        key, value = packed_key_BHSD[:, :, :most], packed_value_BHSE[:, :, :most]
        counts = None
        if min(packed[0]) < most:
            counts = torch.arange(most, device=key.device) < packed_length_BH[:, :, None]
            # a row that does not count may hold anything, and 0 times NaN is NaN
            value = value.masked_fill(~counts[..., None], 0.0)
            counts = counts[:, :, None, None]
        parts.append(partial_attention(query_BHG1D, key, value, **options, visible_BHGWT=counts))
    recent = [
        partial_attention(
            query_BHG1D[row : row + 1],
            read_pages(key_PHND, block_table_BP[row], start, length),
            read_pages(value_PHNE, block_table_BP[row], start, length),
            **options,
        )
        for row, (start, length) in enumerate(zip(recent_start_B.tolist(), length_B.tolist(), strict=True))
    ]
    outs, log_sums = zip(*recent, strict=True)
    parts.append((torch.cat(outs), torch.cat(log_sums)))
    if pseudo is not None:
        parts.append(pseudo.part())
    return combine(parts, sink_HG)[:, :, :, 0].to(query_BHGD.dtype)


def _rows(pages_PHND: torch.Tensor, position_BHS: torch.Tensor, block_table_BP: torch.Tensor) -> torch.Tensor:
    rows_XD, steps = flat_rows(pages_PHND)
    row_BX = row_numbers(position_BHS, block_table_BP, pages_PHND.shape[2], steps)
    return rows_XD[row_BX].view(*position_BHS.shape, -1)
