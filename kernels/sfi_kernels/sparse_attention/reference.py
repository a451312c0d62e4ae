"""Two-segment attention in PyTorch (Sec. 4.2)."""

import torch

from sfi_kernels.pages import read_pages
from sfi_kernels.partial_attention import combine, partial_attention


def sparse_attention(
    query_BHGD: torch.Tensor,
    packed_key_BHSD: torch.Tensor,
    packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    recent_start_B: torch.Tensor,
    length_B: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to sink and selected tokens, packed, and to the recent tokens, in place.

    Args:
        query_BHGD: The step's queries, grouped by KV head.
        packed_key_BHSD: Keys of the packed segment; row s counts where s < packed_length; the others
            may hold anything.
        packed_value_BHSE: Its values.
        packed_length_BH: Tokens of the packed segment by KV head, int32.
        key_PHND: Pages of keys.
        value_PHNE: Pages of values.
        block_table_BP: Page numbers of each request, int32.
        recent_start_B: First position of the recent segment, int32; no packed token lies there.
        length_B: Cached tokens, the query's own included, int32.
        scale: Factor on the products.
        soft_cap: Soft cap of the logits; None for none.
        sink_HG: Learned sink logits; None for none.

    Returns:
        out, [B, H, G, E], in the query's dtype.
    """
    rows = []
    starts, lengths, packed = recent_start_B.tolist(), length_B.tolist(), packed_length_BH.tolist()
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        query = query_BHGD[row : row + 1, :, :, None]
        most, least = max(packed[row]), min(packed[row])
        parts = []
        if most:
            packed_value, counts = packed_value_BHSE[row : row + 1, :, :most], None
            if least < most:
                position = torch.arange(most, device=query.device)
                counts = position < packed_length_BH[row : row + 1, :, None]
                # a row that does not count may hold anything, and 0 times NaN is NaN
                packed_value = packed_value.masked_fill(~counts[..., None], 0.0)
                counts = counts[:, :, None, None]
            parts.append(
                partial_attention(
                    query,
                    packed_key_BHSD[row : row + 1, :, :most],
                    packed_value,
                    scale=scale,
                    soft_cap=soft_cap,
                    visible_BHGWT=counts,
                )
            )
        recent_key = read_pages(key_PHND, block_table_BP[row], start, length)
        recent_value = read_pages(value_PHNE, block_table_BP[row], start, length)
        parts.append(
            partial_attention(query, recent_key, recent_value, scale=scale, soft_cap=soft_cap)
        )
        rows.append(combine(parts, sink_HG)[:, :, :, 0])
    return torch.cat(rows).to(query_BHGD.dtype)
