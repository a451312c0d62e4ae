"""Forwards that replace transformers' own: the same products, sums and roundings.

A forward calls the replaced modules where these have hooks, where gradients are on, or where the kernels do
not take the tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sfi_core.hosts.transformers.cache_name import CACHE_NAME, OLD_NAME, cache_in
from sfi_core.hosts.transformers.fusion.known import AttentionSource
from sfi_core.machine.private import attention_implementation, has_hooks
from sfi_kernels.rms_norm import add_rms_norm, rms_norm
from sfi_kernels.rotary import rotary
from sfi_kernels.silu_mul import silu_mul


def takes(*tensors: torch.Tensor) -> bool:
    """Say whether kernels take the tensors: contiguous, of one dtype and device, without gradients."""
    like = tensors[0]
    return not torch.is_grad_enabled() and all(
        x.dtype == like.dtype and x.device == like.device and x.is_contiguous() for x in tensors
    )


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Norm rows, [..., F], as `LlamaRMSNorm` does."""
    if takes(hidden_states, self.weight):
        return rms_norm.triton(hidden_states, self.weight, self.variance_epsilon)
    plain: torch.Tensor = type(self).forward(self, hidden_states)
    return plain


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Project rows, [..., F], up, gate them, and project them down, as `LlamaMLP` does."""
    gate, up = self.gate_proj(x), self.up_proj(x)
    fused = takes(gate, up) and not has_hooks(self.act_fn)
    out: torch.Tensor = self.down_proj(silu_mul.triton(gate, up) if fused else self.act_fn(gate) * up)
    return out


def layer_forward(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a layer as `LlamaDecoderLayer` does; the first sum and the second norm are one kernel."""
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        **kwargs,
    )
    norm = self.post_attention_layernorm
    if takes(hidden_states, attended, norm.weight) and not has_hooks(norm):
        residual, normed = add_rms_norm.triton(hidden_states, attended, norm.weight, norm.variance_epsilon)
    else:
        residual = hidden_states + attended
        normed = norm(residual)
    out: torch.Tensor = residual + self.mlp(normed)
    return out


def attention_forward(source: AttentionSource) -> Callable[..., Any]:
    """Return an attention's forward, whose norms and rotations are one kernel."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        known = type(self).forward.__globals__
        cache = cache_in(kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k not in (CACHE_NAME, OLD_NAME)}
        lead = hidden_states.shape[:-1]
        shape = (*lead, -1, self.head_dim)
        query, key = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        query, key = _rotated(self, source, query, key, *position_embeddings)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if source.window:
            owner = self if source.window == "module" else self.config
            kwargs["sliding_window"] = getattr(owner, "sliding_window", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention_implementation(self.config), known["eager_attention_forward"]
        )
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*lead, -1).contiguous()), weights

    return forward


def _rotated(
    self: Any, source: AttentionSource, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # queries and keys, [B, T, heads, D] each, with their heads before T
    norms = (self.q_norm, self.k_norm) if source.norms else ()
    weights = [norm.weight for norm in norms]
    whole = cos.shape[-1] == self.head_dim and cos.stride() == sin.stride()
    if whole and takes(query, key, cos, sin, *weights) and not any(map(has_hooks, norms)):
        eps = norms[0].variance_epsilon if norms else 0.0
        query_weight, key_weight = weights or (None, None)
        return rotary.triton(query, key, cos, sin, query_weight, key_weight, eps)
    if norms:
        query, key = self.q_norm(query), self.k_norm(key)
    apply = type(self).forward.__globals__["apply_rotary_pos_emb"]
    rotated: tuple[torch.Tensor, torch.Tensor] = apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    return rotated
