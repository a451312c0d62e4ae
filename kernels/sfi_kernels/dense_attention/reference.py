"""Dense attention in PyTorch, over paged keys and values."""

import torch

from sfi_kernels.pages import read_pages
from sfi_kernels.partial_attention import capped, combine, partial_attention

CHUNK = 512  # keys turned into float32 at once; a chunk stays in the processor's cache


def dense_attention(
    query_BHGWD: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    length_B: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally to every cached position; the W queries are the request's last W tokens.

    Args:
        query_BHGWD: Queries, grouped by KV head.
        key_PHND: Pages of keys.
        value_PHNE: Pages of values; E may differ from D.
        block_table_BP: Page numbers of each request, int32.
        length_B: Cached tokens of each request, the queries' own included; at least W. int32.
        scale: Factor on the products.
        soft_cap: Soft cap of the logits; None for none.
        sink_HG: Learned sink logits; None for none.

    Returns:
        out, [B, H, G, W, E], in the query's dtype.
    """
    W = query_BHGWD.shape[3]
    rows = []
    for row, length in enumerate(length_B.tolist()):
        query = query_BHGWD[row : row + 1]
        spans = (
            [(0, length - W, False), (length - W, length, True)] if W > 1 else [(0, length, False)]
        )
        parts = [
            partial_attention(
                query,
                read_pages(key_PHND, block_table_BP[row], start, stop),
                read_pages(value_PHNE, block_table_BP[row], start, stop),
                scale=scale,
                soft_cap=soft_cap,
                causal=causal,
            )
            for start, stop, causal in spans
            if stop > start
        ]
        rows.append(combine(parts, sink_HG))
    return torch.cat(rows).to(query_BHGWD.dtype)


def window_logits(
    query_BHGWD: torch.Tensor,
    key_PHND: torch.Tensor,
    block_table_BP: torch.Tensor,
    length_B: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return the attention logits of a request's last W queries (Eq. 4).

    Arguments are those of `dense_attention`.

    Returns:
        l, [B, H, G, W, T] float32 with T the longest length; -inf where a query may not look.
    """
    B, H, G, W, D = query_BHGWD.shape
    lengths = length_B.tolist()
    logits = query_BHGWD.new_full((B, H, G * W, max(lengths)), -torch.inf, dtype=torch.float32)
    for row, length in enumerate(lengths):
        query = query_BHGWD[row].float().reshape(H, G * W, D) * scale
        for start in range(0, length, CHUNK):
            stop = min(start + CHUNK, length)
            key = read_pages(key_PHND, block_table_BP[row], start, stop)[0]
            logits[row, :, :, start:stop] = capped(query @ key.float().mT, soft_cap)
    out = logits.view(B, H, G, W, -1)
    for row, length in enumerate(lengths):
        for w in range(W - 1):  # the last query sees everything
            out[row, :, :, w, length - W + w + 1 :] = -torch.inf
    return out
