"""Appending to the paged KV cache in PyTorch."""

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
    """Write each request's new tokens in place: keys, values and the keys' float32 norms.

    A request's new keys and values are the last `count` of T, in the pages' dtype, with a last stride of 1; 0 leaves it
    unchanged. `start_B` is the position of its first one. The block table has room for all.
    """
    check(key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP)
    T, N = key_BHTD.shape[2], key_PHND.shape[2]
    norm_BHT = torch.linalg.vector_norm(key_BHTD, dim=-1, dtype=torch.float32)
    tables = block_table_BP.tolist()
    for row, (start, count) in enumerate(zip(start_B.tolist(), count_B.tolist(), strict=True)):
        token = first = T - count
        while token < T:  # page by page
            slot, offset = divmod(start + token - first, N)
            size = min(T - token, N - offset)
            page, to, part = tables[row][slot], slice(offset, offset + size), slice(token, token + size)
            key_PHND[page, :, to] = key_BHTD[row, :, part]
            value_PHNE[page, :, to] = value_BHTE[row, :, part]
            norm_PHN[page, :, to] = norm_BHT[row, :, part]
            token += size


def check(*operands: torch.Tensor) -> None:
    """Raise the errors of `append`, given its arguments."""
    key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP = operands
    names = "key BHTD, value BHTE, start B, count B, key_pages PHND, value_pages PHNE, norm PHN, block_table Bp"
    check_shapes(names, *operands)
    check_pages(key_BHTD, "key", key_pages=key_PHND)
    check_pages(value_BHTE, "value", value_pages=value_PHNE)
    check_int32(key_BHTD.device, start=start_B, count=count_B, block_table=block_table_BP)
    if norm_PHN.dtype != torch.float32 or not norm_PHN.is_contiguous():
        raise ValueError(f"norm must be contiguous float32, got {norm_PHN.dtype} with strides {norm_PHN.stride()}")
    for name, new in (("key", key_BHTD), ("value", value_BHTE)):
        if new.stride(3) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got {new.stride(3)}")
