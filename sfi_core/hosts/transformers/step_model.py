"""The tables of a transformers model for compiled steps: where all its modules are known by their source."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers.activations import GELUTanh, SiLUActivation

from sfi_core.engine.compiled_steps import StepModel
from sfi_core.hosts.transformers import known as sources
from sfi_core.machine.private import has_hooks
from sfi_kernels import tables as words
from sfi_kernels.compiled import KINDS
from sfi_kernels.tables import LAYER_WORDS, STEP_WORDS, Layer, Real, Step

NORMS = {  # by the words of a layer's row: Llama's layer, then Gemma 2's
    "llama": {Layer.NORM: "input_layernorm", Layer.MLP_NORM: "post_attention_layernorm"},
    "gemma": {
        Layer.NORM: "input_layernorm", Layer.AFTER: "post_attention_layernorm",
        Layer.MLP_NORM: "pre_feedforward_layernorm", Layer.MLP_AFTER: "post_feedforward_layernorm",
    },
}  # fmt: skip
GATES = {SiLUActivation: 0, torch.nn.SiLU: 0, GELUTanh: 1}


class UnknownError(Exception):
    """A module that compiled steps do not know; the message names it."""


def step_model(model: Any) -> StepModel:
    """Return a model's tables for a CPU; raise `UnknownError` for a module that is not known."""
    holds: list[Any] = []
    if sources.digest(type(model).forward) not in sources.CAUSAL_LM:  # it has hooks of ours
        raise UnknownError(f"{type(model).__name__}, which compiled steps do not know")
    base, head = model.model, model.get_output_embeddings()
    _check(base, sources.MODEL)
    layers = list(base.layers[: model.config.num_hidden_layers])
    rows = [_layer_row(layer, holds) for layer in layers]
    attention, mlp = layers[0].self_attn, layers[0].mlp
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    by_kind = "layer_type" in inspect.signature(base.rotary_emb.forward).parameters
    turned = sorted(set(kinds)) if by_kind else [""]
    layer_LX, step_X, real_X = np.stack(rows), np.zeros(STEP_WORDS, np.int64), np.zeros(len(Real), np.float32)
    layer_LX[:, Layer.ROTATION] = [turned.index(kind if by_kind else "") for kind in kinds]
    D = attention.head_dim
    heads = attention.k_proj.out_features // D
    step_X[[Step.LAYERS, Step.HIDDEN, Step.HEADS, Step.WIDTH]] = len(layers), model.config.hidden_size, heads, D
    step_X[Step.GROUP] = attention.q_proj.out_features // (heads * D)
    step_X[Step.INNER], step_X[Step.GELU] = mlp.gate_proj.out_features, GATES[type(mlp.act_fn)]
    step_X[Step.LAST_NORM] = _norm(base.norm, holds)
    step_X[Step.HEAD :] = _matrix(head, holds)
    for word, norm in ((Real.EPS, layers[0].input_layernorm), (Real.HEAD_EPS, getattr(attention, "q_norm", None))):
        real_X[word] = 0.0 if norm is None else norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    real_X[Real.SCALE] = attention.scaling
    real_X[Real.CAP] = getattr(attention, "attn_logit_softcapping", None) or 0.0
    cap = getattr(model.config, "final_logit_softcapping", None)

    def turn(position_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        like, options = torch.empty(1, 1), [(kind,) if by_kind else () for kind in turned]
        tables = [base.rotary_emb(like, position_X[None], *kind) for kind in options]
        cos, sin = zip(*tables, strict=True)
        return torch.cat(cos), torch.cat(sin)

    with torch.no_grad():
        cos, _ = turn(torch.zeros(1, dtype=torch.long))
    if cos.shape[-1] != D or D % 8:
        raise UnknownError(f"heads of {D} numbers, of which {cos.shape[-1]} turn: not all, or no multiple of 8")
    if any(size % words.BLOCK for size in (model.config.hidden_size, mlp.gate_proj.out_features)):
        raise UnknownError("rows of no multiple of 32 numbers")
    return StepModel(
        layer_LX=layer_LX, step_X=step_X, real_X=real_X, embed=model.get_input_embeddings(), turn=turn,
        finish=(lambda logits: torch.tanh(logits / cap) * cap) if cap else lambda logits: logits, holds=holds,
    )  # fmt: skip


def _check(module: Any, known: Any) -> str:
    digest = sources.digest(type(module).forward)
    if digest not in known or has_hooks(module):
        raise UnknownError(f"{type(module).__name__}, which compiled steps do not know")
    return digest


def _layer_row(layer: Any, holds: list[Any]) -> Any:
    attention, row = layer.self_attn, np.zeros(LAYER_WORDS, np.int64)
    gemma = _check(layer, sources.DECODER_LAYER | sources.GEMMA_LAYER) in sources.GEMMA_LAYER
    _check(layer.mlp, sources.GATED_MLP)
    attentions = sources.ATTENTION | sources.GEMMA_ATTENTION
    digest = _check(attention, attentions)
    if not sources.rotates_halves(type(attention).forward):
        raise UnknownError(f"{type(attention).__name__}, whose rotation compiled steps do not know")
    if type(layer.mlp.act_fn) not in GATES:
        raise UnknownError(f"{type(layer.mlp.act_fn).__name__}, a gate that compiled steps do not know")
    for word, name in NORMS["gemma" if gemma else "llama"].items():
        row[word] = _norm(getattr(layer, name), holds)
    if attentions[digest].norms:
        row[Layer.QUERY_NORM], row[Layer.KEY_NORM] = _norm(attention.q_norm, holds), _norm(attention.k_norm, holds)
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    matrices = *projections, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    row[Layer.MATRICES :] = np.concatenate([_matrix(module, holds) for module in matrices])
    return row


def _norm(module: Any, holds: list[Any]) -> int:
    gemma = _check(module, sources.RMS_NORM | sources.GEMMA_NORM) in sources.GEMMA_NORM
    weight = module.weight.detach().float()
    weight = (1.0 + weight if gemma else weight).contiguous()
    holds.append(weight)
    return int(weight.data_ptr())


def _matrix(module: Any, holds: list[Any]) -> Any:
    # a matrix of blocks has its row; a plain one lies as PyTorch has it
    if not isinstance(module, torch.nn.Linear) or has_hooks(module):
        raise UnknownError(f"{type(module).__name__}, a matrix that compiled steps do not know")
    if hasattr(module, "matrix"):
        holds.append(module)
        return module.matrix
    weight = module.weight.detach()
    if weight.dtype not in KINDS or not weight.is_contiguous() or weight.shape[1] % words.BLOCK:
        raise UnknownError(f"a matrix of {str(weight.dtype).removeprefix('torch.')} numbers, {tuple(weight.shape)}")
    bias = None if module.bias is None else module.bias.detach().float()
    holds.extend([weight, bias])
    row = words.row_of(KINDS[weight.dtype], weight.shape, weight)
    row[words.BIAS] = 0 if bias is None else bias.data_ptr()
    return row
