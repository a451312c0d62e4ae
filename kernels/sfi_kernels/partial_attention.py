"""Attention in PyTorch: over one segment of keys, joined by log-sum-exp, which is exact. All references rest on it."""

from typing import Any, NamedTuple

import torch

BLOCK_ELEMENTS = 1 << 24  # logits held at once by the explicit path

Part = tuple[torch.Tensor, torch.Tensor]  # what `partial_attention` returns


class PseudoToken(NamedTuple):
    """The pseudo tokens of a step, float32: each is a term of a softmax that stands for all keys that are not read.

    `logit_BHG` is after scale and soft cap, -inf for no pseudo token; it may come in X parts, [B, H, G, X],
    whose log-sum-exp it is. `value_BHE` is finite for a fast request, anything for another.
    """

    logit_BHG: torch.Tensor
    value_BHE: torch.Tensor

    def part(self) -> Part:
        """Return output and log-sum-exp, as `partial_attention` returns a segment's."""
        B, H, G = self.logit_BHG.shape[:3]
        logit_BHGX = self.logit_BHG.reshape(B, H, G, -1)
        return self.value_BHE[:, :, None, None].expand(B, H, G, 1, -1), logit_BHGX.logsumexp(-1, keepdim=True)

    def of(self, rows: slice) -> "PseudoToken":
        """Return the pseudo tokens of some requests."""
        return PseudoToken(self.logit_BHG[rows], self.value_BHE[rows])


def partial_attention(
    query_BHGWD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTE: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    causal: bool = False,
    visible_BHGWT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to one segment of keys.

    `soft_cap` is c of c * tanh(logit / c). If `causal`, query w sees keys 0 to w only, W = T, and `visible_BHGWT` is
    None; otherwise this says which keys a query sees, broadcastable, None for all. Return out, [B, H, G, W, E] float32,
    and the log-sum-exp of the logits, [B, H, G, W] float32; zeros and -inf for a query without keys.
    """
    plain = soft_cap is None and visible_BHGWT is None and key_BHTD.shape[-1] == value_BHTE.shape[-1]
    if plain and query_BHGWD.device.type == "cpu":
        return _fused(query_BHGWD, key_BHTD, value_BHTE, scale, causal)
    if causal:
        W = query_BHGWD.shape[3]
        visible_BHGWT = torch.ones(W, W, dtype=torch.bool, device=query_BHGWD.device).tril()
    return _explicit(query_BHGWD, key_BHTD, value_BHTE, scale, soft_cap, visible_BHGWT)


def combine(parts: list[Part], sink_HG: torch.Tensor | None = None) -> torch.Tensor:
    """Join `partial_attention`'s results for disjoint segments to one softmax, [B, H, G, W, E] float32.

    `sink_HG` are learned logits that take part in the softmax without a value (gpt-oss).
    """
    if len(parts) == 1 and sink_HG is None:
        return parts[0][0]
    if len(parts) == 2 and sink_HG is None:  # noqa: PLR2004 - the fast step, in few operations
        (first, first_lse), (second, second_lse) = parts
        # a query that sees no key gets a share of zeros, whatever the share; a true NaN is in the outputs too
        lead = (first_lse - second_lse).nan_to_num(0.0, torch.inf, -torch.inf)
        return torch.lerp(second, first, lead.sigmoid().unsqueeze(-1))
    lse = torch.stack([part[1] for part in parts])
    total = lse.logsumexp(0)
    if sink_HG is not None:
        total = torch.logaddexp(total, sink_HG.float()[None, :, :, None].expand_as(total))
    weight = (lse - finite(total)).exp().unsqueeze(-1)
    return sum((w * part[0] for w, part in zip(weight, parts, strict=True)), torch.zeros(()))


def _fused(query_BHGWD: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool) -> Part:
    # PyTorch's CPU flash attention itself: `scaled_dot_product_attention` drops the log-sum-exp. Without a
    # word it gives something else for a last stride that is not 1, as keys have that lie [D, T] in memory.
    query_BHGWD, key, value = (
        rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (query_BHGWD, key, value)
    )
    if query_BHGWD.dtype == torch.float16:  # four times slower than float32
        query_BHGWD, key, value = query_BHGWD.float(), key.float(), value.float()
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    B, H, G, W, D = query_BHGWD.shape
    if not causal:  # the group's queries are rows of one product, so that no key is repeated
        out, lse = flash(query_BHGWD.reshape(B, H, G * W, D), key, value, scale=scale)
        return out.float().view(B, H, G, W, -1), lse.view(B, H, G, W)
    parts = [flash(query_BHGWD[:, :, g], key, value, 0.0, True, scale=scale) for g in range(G)]
    return torch.stack([p[0] for p in parts], 2).float(), torch.stack([p[1] for p in parts], 2)


def _explicit(
    query_BHGWD: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    soft_cap: float | None, visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    B, H, G, W, _ = query_BHGWD.shape
    T = key.shape[2]
    block = max(1, BLOCK_ELEMENTS // (B * H * G * T))
    key_BH1DT, value_BH1TE = key.float().mT[:, :, None], value.float()[:, :, None]
    outs, lses = [], []
    for first in range(0, W, block):
        rows = slice(first, first + block)
        logits = capped(query_BHGWD[:, :, :, rows].float() @ key_BH1DT * scale, soft_cap)
        if visible is not None:
            shown = visible[..., rows, :] if visible.shape[-2] > 1 else visible
            logits = logits.masked_fill(~shown, -torch.inf)
        lse = logits.logsumexp(-1)
        outs.append((logits - finite(lse).unsqueeze(-1)).exp() @ value_BH1TE)
        lses.append(lse)
    return torch.cat(outs, 3), torch.cat(lses, 3)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Replace -inf by 0, so that exp(-inf - lse) is 0 for a query without keys; NaN stays NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def capped(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Bend logits smoothly into (-soft_cap, soft_cap), as Gemma 2 does; None leaves them."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def causal_attention(
    query_1HGWD: torch.Tensor, key_1HTD: torch.Tensor, value_1HTE: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend causally to every position; the W queries are the last of the T tokens.

    Arguments and result are as in `dense_attention`.
    """
    W, T = query_1HGWD.shape[3], key_1HTD.shape[2]
    before = T if W == 1 else T - W  # one query sees everything
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    parts = []
    if before:
        parts.append(partial_attention(query_1HGWD, key_1HTD[:, :, :before], value_1HTE[:, :, :before], **options))
    if before < T:
        new = key_1HTD[:, :, before:], value_1HTE[:, :, before:]
        parts.append(partial_attention(query_1HGWD, *new, **options, causal=True))
    if len(parts) == 2:  # noqa: PLR2004
        parts = [_joined(*parts)]
    return combine(parts, sink_HG).to(query_1HGWD.dtype)


def _joined(first: Part, second: Part) -> Part:
    (out, lse), (other_out, other_lse) = first, second
    total = torch.logaddexp(lse, other_lse)
    share, other_share = (lse - finite(total)).exp(), (other_lse - finite(total)).exp()
    return out * share[..., None] + other_out * other_share[..., None], total
