"""Reading one request's rows out of the paged KV cache."""

import torch


def read_pages(
    pages_PHN: torch.Tensor, block_table_P: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Return positions `start` to `stop` of a request as one tensor.

    Args:
        pages_PHN: Pages, heads before tokens, `[P, H, N]` or `[P, H, N, D]`.
        block_table_P: The request's page numbers, in order.
        start: First position.
        stop: One past the last position.

    Returns:
        `[1, H, stop - start]` or `[1, H, stop - start, D]`: a view where one page holds all of it, as on CPU,
        where a request has one page; a copy otherwise.
    """
    page_size = pages_PHN.shape[2]
    first, last = start // page_size, max(start, stop - 1) // page_size
    if first == last:
        page = pages_PHN.narrow(0, int(block_table_P[first]), 1)
        return page[:, :, start - first * page_size : stop - first * page_size]
    rows = pages_PHN[block_table_P[first : last + 1].long()].transpose(0, 1)
    joined = rows.reshape(1, rows.shape[0], -1, *rows.shape[3:])
    return joined[:, :, start - first * page_size : stop - first * page_size]
