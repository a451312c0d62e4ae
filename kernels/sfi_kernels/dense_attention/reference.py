"""Dense attention in PyTorch, over paged keys and values."""

import torch

from sfi_kernels.op import check_pages, check_shapes
from sfi_kernels.pages import read_pages, wide_chunks
from sfi_kernels.partial_attention import capped, causal_attention, finite


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

    A request shorter than W has its queries in the last places; the others are padding, whose output is zeros. The
    output, [B, H, G, W, E], has the query's dtype.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    out = query_BHGWD.new_zeros(*query_BHGWD.shape[:4], value_PHNE.shape[3])
    for row, length in enumerate(length_B.tolist()):
        W = min(query_BHGWD.shape[3], length)
        if W == 0:
            continue
        key, value = (read_pages(pages, block_table_BP[row], 0, length) for pages in (key_PHND, value_PHNE))
        out[row : row + 1, :, :, -W:] = causal_attention(
            query_BHGWD[row : row + 1, :, :, -W:], key, value, scale=scale, soft_cap=soft_cap, sink_HG=sink_HG
        )
    return out


def dense_attention_with_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend as `dense_attention` does, in float32, and return the last query's logits, in one pass over the keys.

    PyTorch's fused attention does not return the logits, [B, H, G, 1, T] float32 with T the longest length, -inf beyond
    a request's own: the evidence would read the keys a second time.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    H, W = query_BHGWD.shape[1], query_BHGWD.shape[3]
    if min(H, W) > 1:  # head by head: the logits of all queries are large
        parts = [
            dense_attention_with_logits(
                query_BHGWD[:, head], key_PHND[:, head], value_PHNE[:, head], block_table_BP, length_B, scale=scale,
                soft_cap=soft_cap, sink_HG=None if sink_HG is None else sink_HG[head],
            )
            for head in (slice(h, h + 1) for h in range(H))
        ]  # fmt: skip
        return torch.cat([out for out, _ in parts], 1), torch.cat([logits for _, logits in parts], 1)
    logits_BHGWT = window_logits(query_BHGWD, key_PHND, block_table_BP, length_B, scale=scale, soft_cap=soft_cap)
    if sink_HG is None:
        weight_BHGWT = logits_BHGWT.softmax(-1)
    else:
        log_sum = torch.logaddexp(logits_BHGWT.logsumexp(-1), sink_HG.float()[None, :, :, None])
        weight_BHGWT = (logits_BHGWT - finite(log_sum).unsqueeze(-1)).exp_()
    outs = []
    for row, length in enumerate(length_B.tolist()):
        weight_HXT, chunks = weight_BHGWT[row].flatten(1, 2), wide_chunks(value_PHNE, block_table_BP[row], length)
        out_HXE = torch.stack([weight_HXT[..., span] @ value_HNE for span, value_HNE in chunks]).sum(0)
        outs.append(out_HXE.view(*query_BHGWD.shape[1:4], -1))
        outs[row][:, :, : max(0, W - length)] = 0  # padding, which sees nothing
    out = outs[0][None] if len(outs) == 1 else torch.stack(outs)
    return out.to(query_BHGWD.dtype), logits_BHGWT[:, :, :, -1:]


def window_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor, length_B: torch.Tensor, *,
    scale: float, soft_cap: float | None = None, longest: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention logits of a request's last W queries, -inf where they may not look (Eq. 4).

    l is [B, H, G, W, T] float32 with T the longest length. Arguments are those of `dense_attention`, and `longest`,
    the largest length; None reads `length_B`, which waits for the device.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B)
    lengths, (B, H, G, W, D) = length_B.tolist(), query_BHGWD.shape
    T = longest or max(lengths)
    out_BHGWT = query_BHGWD.new_empty(B, H, G, W, T, dtype=torch.float32)
    for row, length in enumerate(lengths):
        query_HXD = (query_BHGWD[row].float() * scale).reshape(H, G * W, D)
        logits_HXT = out_BHGWT[row].view(H, G * W, T)
        for span, key_HND in wide_chunks(key_PHND, block_table_BP[row], length):
            logits_HXT[..., span] = capped(query_HXD @ key_HND.mT, soft_cap)
        logits_HXT[..., length:] = -torch.inf
        for w in range(W - 1):  # the last query sees everything
            out_BHGWT[row, :, :, w, max(0, length - W + w + 1) :] = -torch.inf
    return out_BHGWT


def check(
    query: torch.Tensor, key: torch.Tensor, block_table: torch.Tensor, length: torch.Tensor,
    value: torch.Tensor | None = None, sink: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise `ValueError` unless the operands fit together."""
    check_shapes("query BHGWD, key PHND, block_table Bp, length B", query, key, block_table, length)
    check_pages(query, "query", key=key)
    if value is not None:
        check_shapes("key PHND, value PHNE", key, value)
        check_pages(query, "query", value=value)
    if sink is not None:
        check_shapes("sink HG", sink, H=query.shape[1], G=query.shape[2])
