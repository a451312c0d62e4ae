"""The gated delta rule of Qwen3-Next and Qwen3.5 in float32 and plain torch, for models in vLLM.

vLLM's own kernel for CPUs takes bfloat16 alone, whose rounding hides which token is right. This stands for it in
layers of float32, over vLLM's own states, groups and blocks; the rule is that of transformers.
"""

from typing import Any

import torch
from torch.nn.functional import conv1d, silu, softplus
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import _resolve_layer_name

NATIVE = gdn_attention.cpu_gdn_attention_core


def cpu_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: gdn_attention.LayerNameType,
) -> None:
    """Read each request's state, go on from it by its tokens, and write it back; see vLLM's."""
    if mixed_qkv.dtype != torch.float32:
        NATIVE(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    context: Any = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    batch = context.attn_metadata[layer.prefix]
    start, begun = batch.non_spec_query_start_loc.tolist(), batch.has_initial_state
    for row, state in enumerate(batch.non_spec_state_indices_tensor[: len(start) - 1].tolist()):
        tokens = slice(start[row], start[row + 1])
        if tokens.start < tokens.stop:
            known = begun is None or bool(begun[row])
            core_attn_out[tokens] = _row(layer, mixed_qkv[tokens], b[tokens], a[tokens], state, known=known)


def _row(
    layer: Any, mixed_TC: torch.Tensor, b_TH: torch.Tensor, a_TH: torch.Tensor, state: int, *, known: bool
) -> torch.Tensor:
    weight_CW = gdn_attention._unpacked_conv_weight(layer)  # noqa: SLF001
    conv_CW, rule_HDE = layer.kv_cache[0][state].T, layer.kv_cache[1][state].transpose(1, 2)
    if not known:
        conv_CW.zero_()
        rule_HDE.zero_()
    seen_CT = torch.cat((conv_CW, mixed_TC.T), 1)
    conv_CW.copy_(seen_CT[:, -conv_CW.shape[1] :])
    mixed_TC = silu(conv1d(seen_CT, weight_CW[:, None], groups=len(weight_CW))).T
    query, key, value = layer.rearrange_mixed_qkv(mixed_TC)  # [1, T, heads, D]
    group = value.shape[2] // key.shape[2]
    g = -layer.A_log.float().exp() * softplus(a_TH.float() + layer.dt_bias)
    rule = torch_recurrent_gated_delta_rule if len(mixed_TC) == 1 else torch_chunk_gated_delta_rule
    out, last = rule(
        *(x.repeat_interleave(group, 2) for x in (query, key)), value, g[None], b_TH.sigmoid()[None],
        initial_state=rule_HDE[None].clone(), output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert last is not None
    rule_HDE.copy_(last[0])
    return out[0]


def stand_in() -> None:
    """Let vLLM register it as its operation, once in a process and before any model has the layer."""
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core
