"""Appending to the paged KV cache in PyTorch."""

from collections.abc import Iterator

import torch

from sfi_kernels.shapes import check_int32, check_pages, check_shapes


def append(
    key_BHTD: torch.Tensor,
    value_BHTE: torch.Tensor,
    start_B: torch.Tensor,
    count_B: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    norm_PHN: torch.Tensor,
    block_table_BP: torch.Tensor,
) -> None:
    """Write each request's new tokens in place: keys, values and the keys' L2 norms.

    Args:
        key_BHTD: New keys, in the pages' dtype; a request's are the last `count` of T. The last stride is 1.
        value_BHTE: New values, likewise.
        start_B: Position of each request's first new token, int32.
        count_B: New tokens, int32, at most T; 0 leaves a request unchanged.
        key_PHND: Pages of keys, of any strides; the kernel wants a last stride of 1.
        value_PHNE: Pages of values, likewise.
        norm_PHN: Norms of the keys, float32.
        block_table_BP: Page numbers of each request, int32, with room for all new tokens.

    Raises:
        ValueError: The shapes, dtypes, devices or strides do not fit.
    """
    check(key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP)
    T, N = key_BHTD.shape[2], key_PHND.shape[2]
    norm_BHT = torch.linalg.vector_norm(key_BHTD, dim=-1, dtype=torch.float32)
    tables = block_table_BP.tolist()
    for row, (start, count) in enumerate(zip(start_B.tolist(), count_B.tolist(), strict=True)):
        for source, slot, offset, size in _pieces(start, count, N):
            page, to = tables[row][slot], slice(offset, offset + size)
            part = slice(T - count + source, T - count + source + size)
            key_PHND[page, :, to] = key_BHTD[row, :, part]
            value_PHNE[page, :, to] = value_BHTE[row, :, part]
            norm_PHN[page, :, to] = norm_BHT[row, :, part]


def _pieces(start: int, count: int, page_size: int) -> Iterator[tuple[int, int, int, int]]:
    # (offset among the new tokens, slot in the block table, offset in the page, tokens) of each page
    done = 0
    while done < count:
        slot, offset = divmod(start + done, page_size)
        size = min(count - done, page_size - offset)
        yield done, slot, offset, size
        done += size


def check(*operands: torch.Tensor) -> None:
    """Raise the errors of `append`, given its arguments."""
    key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP = operands
    names = "key BHTD, value BHTE, start B, count B, key_pages PHND, value_pages PHNE, norm PHN, block_table Bp"
    check_shapes(names, *operands)
    check_pages(key_BHTD, "key", key_pages=key_PHND)
    check_pages(value_BHTE, "value", value_pages=value_PHNE)
    check_int32(key_BHTD.device, start=start_B, count=count_B, block_table=block_table_BP)
    if norm_PHN.dtype != torch.float32 or not norm_PHN.is_contiguous():
        got = f"{norm_PHN.dtype} with strides {norm_PHN.stride()}"
        raise ValueError(f"norm must be contiguous float32, got {got}")
    for name, new in (("key", key_BHTD), ("value", value_BHTE)):
        if new.stride(3) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got {new.stride(3)}")
