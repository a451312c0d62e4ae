"""A tiny random model of every model type that transformers maps to a causal language model.

A config's own class gives its fields; `SIZES` makes them small by name, `SPECIAL` says what a type needs besides.
"""

import math

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

VOCABULARY = 300
DEPTH = 4
# kept out of a config that has none by default
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "attention_window_size")
SIZES = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "eod_token_id": 2,
    "forced_eos_token_id": None, "unpadded_vocab_size": VOCABULARY,
    "sep_token_id": 2, "tie_word_embeddings": False,  # a tied random model says its last token again and again
    # sizes and depths, under all their names
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "dim_ff", "ffn_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("dense_intermediate_size", "d_ff"), 64), "attention_hidden_size": 128, "attention_head_dim": 32,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), DEPTH),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "d_kv", "attention_head_size", "swa_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("max_target_positions", "context_length"), 512),
    "rotary_dim": 8, "dim_model_base": 64, "query_pre_attn_scalar": 16,
    **dict.fromkeys(WINDOWS, 12), "max_window_layers": 2,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "decoder_sparse_step"), 1),
    "is_decoder": True, "zero_expert_num": 2, "moe_num_shared_experts": 1, "num_shared_experts": 1,
    "router_hidden_size": 16,
    # latent attention and indexers
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
    "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    # linear attention, state spaces and convolutions
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, "block_size": 8, "chunk_size": 8, "mamba_chunk_size": 8,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_expand": 1, "mamba_d_ssm": 64, "mamba_dt_rank": 8, "n_mamba_heads": 4, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "mamba_headdim": 16, "mamba_ngroups": 1, "n_groups": 1, "ssm_state_size": 16,
    "state_size": 16, "time_step_rank": 8, "adapter_rank": 8,
}  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 2
QWEN4 = {
    "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 2, "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
GEMMA3N = {
    "layer_types": ALTERNATE, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2,
}  # fmt: skip
GEMMA4 = {
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 32,
    "num_kv_shared_layers": 2, "layer_types": ALTERNATE,
}  # fmt: skip
# by model type: the settings that its config needs besides, or that show what is special about it
SPECIAL = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": ALTERNATE, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]} for kind in ALTERNATE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": GEMMA3N, "gemma4_text": GEMMA4, "gemma4": GEMMA4, "gemma4_unified_text": GEMMA4,
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] * 4,
        "index_n_heads": 2,
    },
    "longcat_flash": {"head_dim": 8}, "mamba2": {"expand": 1}, "mistral": {"sliding_window": None},
    "rwkv": {"attention_hidden_size": 64}, "xlstm": {"qk_dim_factor": 1.0},
    "reformer": {"axial_pos_embds_dim": [32, 32]}, "xmod": {"default_language": "en_XX"},
    "qwen4_exp": QWEN4, "qwen4_exp_text": QWEN4, "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small(config) -> dict:
    """Return the settings that make a config's model tiny."""
    known = {*config.to_dict(), *type(config).attribute_map}
    settings = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        for name in ("head_dim", "qk_head_dim"):
            settings.pop(name, None)  # it follows from the others
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name in WINDOWS:
        if getattr(config, name, None) is None:
            settings.pop(name, None)
    listed = type(config).attribute_map.get("layer_types", "layer_types")
    derived = isinstance(getattr(type(config), listed, None), property)
    if not derived and (kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or []))):
        full = [kind for kind in kinds if kind in ("full_attention", "hybrid")]
        others = [kind for kind in kinds if kind not in full]
        settings[listed] = (([*others, *full]) * DEPTH)[:DEPTH]
    return settings


def build(model_type: str, **more):
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    text = default.get_text_config(decoder=True)
    parts = {name: part for name, part in vars(default).items() if isinstance(part, PreTrainedConfig)}
    nested = next((name for name, part in parts.items() if part is text), None)
    others = {name: {"model_type": part.model_type, **small(part)} for name, part in parts.items()}
    text_settings = {**small(text if nested else default), **SPECIAL.get(model_type, {}), **more}
    settings = {**others, **({nested: {"model_type": text.model_type, **text_settings}} if nested else text_settings)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**settings), dtype=torch.float32).eval()
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA drops soft caps
    return spread(model)


@torch.no_grad()
def spread(model):
    """Draw weights so large that every layer adds something; with fresh ones all logits are nearly tied."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))
        elif name.endswith("sinks"):
            parameter.normal_(1.0, 1.0)
    model.get_input_embeddings().weight.normal_(0.0, 0.3)
    return model
