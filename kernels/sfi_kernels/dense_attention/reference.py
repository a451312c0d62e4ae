"""Dense attention in PyTorch, over paged keys and values."""

import torch

from sfi_kernels.pages import read_pages, wide_chunks
from sfi_kernels.partial_attention import capped, combine, finite, partial_attention
from sfi_kernels.shapes import check_pages, check_shape


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
        query_BHGWD: Queries, grouped by KV head. A request shorter than W has its own in the last places; the
            others are padding.
        key_PHND: Pages of keys.
        value_PHNE: Pages of values; E may differ from D.
        block_table_BP: Page numbers of each request, int32.
        length_B: Cached tokens of each request, the queries' own included, int32.
        scale: Factor on the products.
        soft_cap: Soft cap of the logits; None for none.
        sink_HG: Learned sink logits; None for none.

    Returns:
        out, [B, H, G, W, E], in the query's dtype; zeros for padding.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    out = query_BHGWD.new_zeros(*query_BHGWD.shape[:4], value_PHNE.shape[3])
    for row, length in enumerate(length_B.tolist()):
        W = min(query_BHGWD.shape[3], length)
        if W == 0:
            continue
        query = query_BHGWD[row : row + 1, :, :, -W:]
        first = length - W if W > 1 else length  # from here on, attention is causal
        parts = []
        for start, stop, causal in ((0, first, False), (first, length, True)):
            if stop > start:
                key, value = (read_pages(pages, block_table_BP[row], start, stop) for pages in (key_PHND, value_PHNE))
                part = partial_attention(query, key, value, scale=scale, soft_cap=soft_cap, causal=causal)
                parts.append(part)
        out[row : row + 1, :, :, -W:] = combine(parts, sink_HG)
    return out


def window_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor, length_B: torch.Tensor, *,
    scale: float, soft_cap: float | None = None, longest: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention logits of a request's last W queries (Eq. 4).

    Arguments are those of `dense_attention`, and `longest`, the largest length; None reads `length_B`, which
    waits for the device.

    Returns:
        l, [B, H, G, W, T] float32 with T the longest length; -inf where a query may not look.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B)
    lengths = length_B.tolist()
    W, T = query_BHGWD.shape[3], longest or max(lengths)
    rows = [
        _row_logits(query_BHGWD[row].float() * scale, key_PHND, block_table_BP[row], length, soft_cap)
        for row, length in enumerate(lengths)
    ]
    out = rows[0][None] if len(rows) == 1 and lengths[0] == T else _padded(rows, T)
    for row, length in enumerate(lengths):
        for w in range(W - 1):  # the last query sees everything
            out[row, :, :, w, max(0, length - W + w + 1) :] = -torch.inf
    return out


def dense_attention_with_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend and return the logits, in one pass over keys and values.

    PyTorch's fused attention does not return the logits: the evidence would read the keys a second time.

    Returns:
        What `dense_attention` and `window_logits` return, which have the same arguments.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    logits = window_logits(query_BHGWD, key_PHND, block_table_BP, length_B, scale=scale, soft_cap=soft_cap)
    lengths = length_B.tolist()
    weight = weights(logits, sink_HG, all_see=min(lengths) >= query_BHGWD.shape[3]).flatten(2, 3)
    outs = [_weighted(weight[row], value_PHNE, block_table_BP[row], length) for row, length in enumerate(lengths)]
    out = outs[0][None] if len(outs) == 1 else torch.stack(outs)
    return out.view(*query_BHGWD.shape[:4], -1).to(query_BHGWD.dtype), logits


def _row_logits(
    query_HGWD: torch.Tensor, key_PHND: torch.Tensor, table_P: torch.Tensor, length: int, soft_cap: float | None
) -> torch.Tensor:
    # [H, G, W, length] of one request
    H, G, W, D = query_HGWD.shape
    query_HXD = query_HGWD.reshape(H, G * W, D)
    logits_HXT = query_HXD.new_empty(H, G * W, length)
    for span, key_CHND in wide_chunks(key_PHND, table_P, length):
        own_CHXN = query_HXD @ key_CHND.mT
        own_HXCN = own_CHXN.permute(1, 2, 0, 3)
        logits_HXT[..., span].view(own_HXCN.shape).copy_(own_HXCN)
    return capped(logits_HXT, soft_cap).view(H, G, W, -1)


def _weighted(weight_HXT: torch.Tensor, value_PHNE: torch.Tensor, table_P: torch.Tensor, length: int) -> torch.Tensor:
    # the sum of one request's values, [H, X, E]
    parts = []
    for span, value_CHNE in wide_chunks(value_PHNE, table_P, length):
        weight_HXCN = weight_HXT[..., span].view(*weight_HXT.shape[:2], *value_CHNE.shape[::2])
        parts.append(weight_HXCN.permute(2, 0, 1, 3) @ value_CHNE)
    return torch.cat(parts).sum(0)


def _padded(rows: list[torch.Tensor], T: int) -> torch.Tensor:
    out = rows[0].new_full((len(rows), *rows[0].shape[:3], T), -torch.inf)
    for row, logits_HGWT in enumerate(rows):
        out[row, ..., : logits_HGWT.shape[-1]] = logits_HGWT
    return out


def weights(logits_BHGWT: torch.Tensor, sink_HG: torch.Tensor | None, *, all_see: bool) -> torch.Tensor:
    """Return the softmax of logits, [B, H, G, W, T]; zeros for a query that sees nothing.

    Logits are -inf where a query may not look. `all_see` promises that every query sees a key, which saves operations.
    """
    if sink_HG is None and all_see:
        return logits_BHGWT.softmax(-1)
    log_sum = logits_BHGWT.logsumexp(-1)
    if sink_HG is not None:
        log_sum = torch.logaddexp(log_sum, sink_HG.float()[None, :, :, None])
    return (logits_BHGWT - finite(log_sum).unsqueeze(-1)).exp_()


def check(
    query: torch.Tensor, key: torch.Tensor, block_table: torch.Tensor, length: torch.Tensor,
    value: torch.Tensor | None = None, sink: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise `ValueError` unless the operands fit together."""
    check_shape(query, "query", B=None, H=None, G=None, W=None, D=None)
    B, H, G, _, D = query.shape
    check_shape(key, "key", P=None, H=H, N=None, D=D)
    check_shape(block_table, "block_table", B=B, P=None)
    check_shape(length, "length", B=B)
    check_pages(query, "query", key=key)
    if value is not None:
        check_shape(value, "value", P=key.shape[0], H=H, N=key.shape[2], E=None)
        check_pages(query, "query", value=value)
    if sink is not None:
        check_shape(sink, "sink", H=H, G=G)
