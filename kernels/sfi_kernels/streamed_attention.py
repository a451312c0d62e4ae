"""Dense attention to keys and values that come block by block, and never lie together.

Blocks are attended one by one and joined by log-sum-exp, which is exact. For a KV cache in host memory, and
for single KV heads of a cache.
"""

from collections.abc import Iterable, Iterator

import torch

from sfi_kernels.partial_attention import capped, combine, finite, partial_attention

# first position, keys [1, H, N, D], values [1, H, N, E]
Block = tuple[int, torch.Tensor, torch.Tensor]
Part = tuple[torch.Tensor, torch.Tensor]  # what `partial_attention` returns


def streamed_attention(
    query_1HGWD: torch.Tensor, blocks: Iterable[Block], length: int, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend causally to every position; the W queries are the last of the request's `length` tokens.

    `blocks` hold the keys and values of positions 0 to `length` - 1, in order, without gaps. Other arguments
    as in `dense_attention`.

    Returns:
        out, [1, H, G, W, E], in the query's dtype.
    """
    W, joined = query_1HGWD.shape[3], None
    for seen, causal, key, value in _pieces(blocks, length - W, W):
        query = query_1HGWD[:, :, :, seen]
        part = partial_attention(query, key, value, scale=scale, soft_cap=soft_cap, causal=causal and key.shape[2] > 1)
        joined = _joined(joined, part, seen, W)
    assert joined is not None, "there is a block"
    return combine([joined], sink_HG).to(query_1HGWD.dtype)


def streamed_attention_with_logits(
    query_1HG1D: torch.Tensor, blocks: Iterable[Block], *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend as `streamed_attention` does with one query, and return the logits.

    Returns:
        out, [1, H, G, 1, E], and the logits, [1, H, G, 1, T] float32.
    """
    parts, logits = [], []
    for _, key, value in blocks:
        own = _logits(query_1HG1D, key, scale, soft_cap)
        lse = own.logsumexp(-1)
        weight = (own - finite(lse).unsqueeze(-1)).exp()
        parts.append(((weight.flatten(2, 3) @ value.float())[:, :, :, None], lse))
        logits.append(own)
    out = combine(parts, sink_HG)
    return out.to(query_1HG1D.dtype), torch.cat(logits, -1)


def streamed_logits(
    query_1HGWD: torch.Tensor, blocks: Iterable[Block], length: int, *, scale: float, soft_cap: float | None = None
) -> torch.Tensor:
    """Return the logits of a request's last W queries, [1, H, G, W, length] float32; -inf for later keys."""
    W = query_1HGWD.shape[3]
    logits = torch.cat([_logits(query_1HGWD, key, scale, soft_cap) for _, key, _ in blocks], -1)
    position_T = torch.arange(length, device=logits.device)
    last_W1 = torch.arange(length - W, length, device=logits.device)[:, None]
    return logits if W == 1 else logits.masked_fill(position_T > last_W1, -torch.inf)


def _logits(query_1HGWD: torch.Tensor, key_1HND: torch.Tensor, scale: float, soft_cap: float | None) -> torch.Tensor:
    _, H, G, W, D = query_1HGWD.shape
    product = (query_1HGWD.float() * scale).reshape(1, H, G * W, D) @ key_1HND.float().mT
    return capped(product, soft_cap).view(1, H, G, W, -1)


def _pieces(blocks: Iterable[Block], first: int, W: int) -> Iterator[tuple[slice, bool, torch.Tensor, torch.Tensor]]:
    # parts of the blocks and the queries that see them: all of a part, or each query up to its own position
    for start, key, value in blocks:
        before = min(max(0, first - start), key.shape[2])
        if before:
            yield slice(0, W), False, key[:, :, :before], value[:, :, :before]
        own = slice(before, None)
        if before < key.shape[2]:
            begin = start + before - first
            stop = begin + key.shape[2] - before
            yield slice(begin, stop), True, key[:, :, own], value[:, :, own]
            if stop < W:
                yield slice(stop, W), False, key[:, :, own], value[:, :, own]


def _joined(known: Part | None, part: Part, seen: slice, W: int) -> Part:
    # join what some of the queries have seen to what all had
    out, lse = part
    if known is None:
        if seen == slice(0, W):
            return part
        known = (out.new_zeros(*out.shape[:3], W, out.shape[4]), lse.new_full((*lse.shape[:3], W), -torch.inf))
    old_out, old_lse = known
    total = torch.logaddexp(old_lse[..., seen], lse)
    safe = finite(total)
    kept, added = (old_lse[..., seen] - safe).exp(), (lse - safe).exp()
    old_out[:, :, :, seen] = old_out[:, :, :, seen] * kept[..., None] + out * added[..., None]
    old_lse[..., seen] = total
    return old_out, old_lse
