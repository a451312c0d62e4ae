"""Dense attention that hands out the last query's logits, in one pass over the keys, on a CPU.

PyTorch's fused attention does not return the logits: the evidence would read the keys a second time. Logits, softmax
and sums are float32. A key is converted to float32 once for the rows of all query heads and queries, while it is in
the processor's cache.
"""

from collections.abc import Iterator

import torch

from sfi_kernels.dense_attention.reference import check, window_logits
from sfi_kernels.op import Op
from sfi_kernels.pages import read_pages, wide_chunks
from sfi_kernels.partial_attention import capped, finite

GROUP = 1 << 20  # logits held at once; a long history takes fewer KV heads together
TOKENS = 4096  # of all KV heads taken together, turned into float32 at once


def dense_attention_with_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    native: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend as `dense_attention` does, and return the last query's logits.

    Arguments are those of `dense_attention`, and `native`, which rounds the weights to the values' dtype and
    multiplies in it, as PyTorch's flash attention does: faster on a processor with products of that dtype.

    Returns:
        out, [B, H, G, W, E], in the query's dtype, zeros for padding; and l, [B, H, G, 1, T] float32 with T
            the longest length, -inf beyond a request's own.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    B, H, G, W, _ = query_BHGWD.shape
    if W == 1:
        return _one_query(query_BHGWD, key_PHND, value_PHNE, block_table_BP, length_B, scale, soft_cap, sink_HG)
    lengths = length_B.tolist()
    out = query_BHGWD.new_zeros(B, H, G, W, value_PHNE.shape[3])
    evidence_BHG1T = query_BHGWD.new_full((B, H, G, 1, max(lengths)), -torch.inf, dtype=torch.float32)
    for row, length in enumerate(lengths):
        count = min(W, length)
        key_HTD = read_pages(key_PHND, block_table_BP[row], 0, length)[0]
        value_HTE = read_pages(value_PHNE, block_table_BP[row], 0, length)[0]
        for heads in _groups(H, G * count * length):
            query_HGWD = query_BHGWD[row, heads, :, W - count :].float() * scale
            logits_HGWT = _logits(query_HGWD, key_HTD[heads], soft_cap)
            evidence_BHG1T[row, heads, :, 0, :length] = logits_HGWT[:, :, -1]
            sinks = None if sink_HG is None else sink_HG[heads]
            weight_HGWT = _weights(logits_HGWT[None], sinks)[0]
            product = _native_product if native else _wide_product
            out[row, heads, :, W - count :] = product(weight_HGWT, value_HTE[heads]).to(out.dtype)
    return out, evidence_BHG1T


with_logits = Op(dense_attention_with_logits)


def _one_query(
    query_BHG1D: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, scale: float, soft_cap: float | None, sink_HG: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    # in the pages, which float32 rows do not leave
    logits = window_logits(query_BHG1D, key_PHND, block_table_BP, length_B, scale=scale, soft_cap=soft_cap)
    weight = _weights(logits, sink_HG).flatten(2, 3)
    rows = enumerate(length_B.tolist())
    outs = [_weighted(weight[row], value_PHNE, block_table_BP[row], length) for row, length in rows]
    out = outs[0][None] if len(outs) == 1 else torch.stack(outs)
    return out.view(*query_BHG1D.shape[:4], -1).to(query_BHG1D.dtype), logits


def _weighted(weight_HXT: torch.Tensor, value_PHNE: torch.Tensor, table_P: torch.Tensor, length: int) -> torch.Tensor:
    # the sum of one request's values, [H, X, E]
    parts = []
    for span, value_CHNE in wide_chunks(value_PHNE, table_P, length):
        weight_HXCN = weight_HXT[..., span].view(*weight_HXT.shape[:2], *value_CHNE.shape[::2])
        parts.append(weight_HXCN.permute(2, 0, 1, 3) @ value_CHNE)
    return torch.cat(parts).sum(0)


def _weights(logits_BHGWT: torch.Tensor, sink_HG: torch.Tensor | None) -> torch.Tensor:
    # the softmax of logits, -inf where a query may not look
    if sink_HG is None:
        return logits_BHGWT.softmax(-1)
    log_sum = torch.logaddexp(logits_BHGWT.logsumexp(-1), sink_HG.float()[None, :, :, None])
    return (logits_BHGWT - finite(log_sum).unsqueeze(-1)).exp_()


def _groups(H: int, logits: int) -> Iterator[slice]:
    # KV heads that are taken together, by the logits of one of them
    size = max(1, min(H, GROUP // max(1, logits)))
    yield from (slice(first, min(first + size, H)) for first in range(0, H, size))


def _logits(query_HGWD: torch.Tensor, key_HTD: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    # [H, G, W, T] float32, causal among the last W tokens
    H, G, W, _ = query_HGWD.shape
    T = key_HTD.shape[1]
    query_HXD, logits_HXT = query_HGWD.flatten(1, 2), query_HGWD.new_empty(H, G * W, T)
    for chunk, wide_HCD in _wide_chunks(key_HTD):
        logits_HXT[:, :, chunk] = capped(query_HXD @ wide_HCD.mT, soft_cap)
    logits_HGWT = logits_HXT.view(H, G, W, T)
    later_WW = torch.ones(W, W, dtype=torch.bool, device=key_HTD.device).triu(1)
    logits_HGWT[..., T - W :].masked_fill_(later_WW, -torch.inf)
    return logits_HGWT


def _native_product(weight_HGWT: torch.Tensor, value_HTE: torch.Tensor) -> torch.Tensor:
    # head by head: pages have room behind a request's tokens, and a batched product would copy the values
    H, G, W, T = weight_HGWT.shape
    weight_HXT = weight_HGWT.reshape(H, G * W, T).to(value_HTE.dtype)
    outs = [weight_XT @ value_TE for weight_XT, value_TE in zip(weight_HXT, value_HTE, strict=True)]
    return torch.stack(outs).view(H, G, W, -1)


def _wide_product(weight_HGWT: torch.Tensor, value_HTE: torch.Tensor) -> torch.Tensor:
    H, G, W, T = weight_HGWT.shape
    weight_HXT = weight_HGWT.reshape(H, G * W, T)
    out_HXE = weight_HXT.new_zeros(H, G * W, value_HTE.shape[2])
    for chunk, wide_HCE in _wide_chunks(value_HTE):
        out_HXE.baddbmm_(weight_HXT[:, :, chunk], wide_HCE)
    return out_HXE.view(H, G, W, -1)


def _wide_chunks(rows_HTD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    # float32 too is copied: a product reads memory itself at half the speed of a copy
    H, T, D = rows_HTD.shape
    size = max(1, min(T, TOKENS // H))
    buffer_HCD = rows_HTD.new_empty(H, size, D, dtype=torch.float32)
    for start in range(0, T, size):
        chunk_HCD = rows_HTD[:, start : start + size]
        wide_HCD = buffer_HCD[:, : chunk_HCD.shape[1]].copy_(chunk_HCD)
        yield slice(start, start + chunk_HCD.shape[1]), wide_HCD
