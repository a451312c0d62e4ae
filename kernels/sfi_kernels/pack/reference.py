"""Packing in PyTorch (Reorg, Sec. 4)."""

import torch


def pack(
    pages_PHND: torch.Tensor,
    block_table_BP: torch.Tensor,
    index_BHS: torch.Tensor,
    out_BHSD: torch.Tensor,
) -> None:
    """Gather positions of the paged cache into a contiguous buffer, in place.

    Args:
        pages_PHND: Pages of keys or of values.
        block_table_BP: Page numbers of each request, int32.
        index_BHS: Positions by KV head, int32, padded with -1 at the end.
        out_BHSD: The packed segment; rows beyond an index's padding are left undefined.
    """
    B, H, S = index_BHS.shape
    page_size = pages_PHND.shape[2]
    position = index_BHS.clamp_min(0).long()
    page = block_table_BP.long().gather(1, (position // page_size).view(B, -1)).view(B, H, S)
    head = torch.arange(H, device=position.device)[:, None]
    out_BHSD[:, :, :S] = pages_PHND[page, head, position % page_size]
