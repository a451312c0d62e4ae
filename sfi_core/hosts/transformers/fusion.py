"""`fused(model)`: run modules whose source is known with fewer kernels, by forwards that replace transformers' own.

A forward gives the same products, sums and roundings; a library may add a product's numbers in another order. It calls
the replaced modules where these have hooks, where gradients are on, or where the kernels do not take the tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import MethodType
from typing import Any, cast

import torch
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers import known as sources
from sfi_core.hosts.transformers.attention import probing
from sfi_core.hosts.transformers.cache import CACHE_NAME, OLD_NAME, SfiCache, SfiLayer, cache_in, under_way
from sfi_core.hosts.transformers.known import AttentionSource
from sfi_core.hosts.transformers.products import Product, takes
from sfi_core.machine.private import attention_implementation, has_hooks
from sfi_core.machine.threads import served, serving
from sfi_kernels.fused import MAX_HEAD, MAX_ROW, Appending, add_rms_norm, rms_norm, rotary, silu_mul

Forward = Callable[..., Any]
# the report counts classes with these names that keep their own forward
REPORTED = ("Norm", "MLP", "Attention", "DecoderLayer")
LOOKS = "sfi_looks"  # of the norm before an MLP: what looks at the residual stream there (`predictions`)
NORMED = "sfi_normed"  # of a tensor: a norm, and what it makes of the tensor


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Norm rows, [..., F], as `LlamaRMSNorm` does; the layer before may have done so (`layer_forward`)."""
    norm, normed = vars(hidden_states).pop(NORMED, (None, None))
    if norm is self:
        return cast("torch.Tensor", normed)
    if takes(hidden_states, self.weight):
        return rms_norm.triton(hidden_states, self.weight, self.variance_epsilon)
    plain: torch.Tensor = type(self).forward(self, hidden_states)
    return plain


def mlp_forward(module: Any) -> Callable[..., Any]:
    """Return the forward of `LlamaMLP`, whose two projections are one product, and whose gate is one kernel."""
    project = Product(module.gate_proj, module.up_proj)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x)
        fused = takes(rows=(gate, up)) and not has_hooks(self.act_fn)
        out: torch.Tensor = self.down_proj(silu_mul.triton(gate, up) if fused else self.act_fn(gate) * up)
        return out

    return forward


def layer_forward(following: Sequence[torch.nn.Module] = ()) -> Callable[..., torch.Tensor]:
    """Return the forward of `LlamaDecoderLayer`, whose sums are one kernel with the norm behind each.

    The second sum's is the last of `following`: the next layer and its norm, or the model's norm. They get the sum
    as ever, with its norm as an attribute of the tensor, and nothing may change the sum before: no module has a hook.
    """

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        norm = self.post_attention_layernorm
        residual, normed = _summed(hidden_states, attended, norm)
        if normed is None:
            normed = norm(residual)
        elif (look := vars(norm).get(LOOKS)) is not None:
            look(residual)
        hidden = self.mlp(normed)
        unseen = following and not any(map(has_hooks, (self, *following)))
        out, normed = _summed(residual, hidden, following[-1]) if unseen else (residual + hidden, None)
        if normed is not None:
            vars(out)[NORMED] = following[-1], normed
        return out

    return forward


def _summed(residual: torch.Tensor, hidden: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    # the sum, and its norm if one kernel computes both
    if takes(residual, hidden, norm.weight) and not has_hooks(norm):
        return add_rms_norm.triton(residual, hidden, norm.weight, norm.variance_epsilon)
    return residual + hidden, None


def attention_forward(module: Any, source: AttentionSource) -> Callable[..., Any]:
    """Return an attention's forward, whose projections are one product, and whose norms and rotations one kernel."""
    projections = Product(module.q_proj, module.k_proj, module.v_proj)

    def forward(
        self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, weights = attended(self, source, projections(hidden_states), *args, **kwargs)
        return self.o_proj(out), weights

    return forward


def attended(
    self: Any, source: AttentionSource, parts: Sequence[torch.Tensor],
    position_embeddings: tuple[torch.Tensor, torch.Tensor], attention_mask: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return what an attention, `self`, makes between its projections, [B, T, X * E], and its weights if it has any.

    `parts` are the projected queries, keys and values, [B, T, heads * D] each.
    """
    names = sources.names_of(type(self).forward)
    cache = cache_in(kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in (CACHE_NAME, OLD_NAME)}
    lead = parts[0].shape[:-1]
    query, key, value = (part.view(*lead, -1, self.head_dim) for part in parts)
    query, key = rotated(self, source, query, key, *position_embeddings, partial(_appending, self, cache, value))
    value = value.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    if source.window:
        owner = self if source.window == "module" else self.config
        kwargs["sliding_window"] = getattr(owner, "sliding_window", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        attention_implementation(self.config), names["eager_attention_forward"]
    )
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return out.reshape(*lead, -1).contiguous(), weights


def _appending(self: Any, cache: Any, value: torch.Tensor) -> Appending | None:
    # where the rotation's launch writes keys and values, [B, T, H, E], of a decoding step under sfi
    ours = isinstance(cache, SfiCache) and cache is under_way.get() and cache.ragged is None and not probing()
    layer = cache.layers[self.layer_idx] if ours else None
    places = layer.places() if isinstance(layer, SfiLayer) else None
    return None if places is None else Appending(value, *places)


def rotated(
    self: Any, source: AttentionSource, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    appending: Callable[[], Appending | None] = lambda: None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return an attention's queries and keys, [B, T, heads, D] each, normed and rotated, with their heads before T."""
    norms = (self.q_norm, self.k_norm) if source.norms else ()
    weights = [norm.weight for norm in norms]
    whole = cos.shape[-1] == self.head_dim and cos.stride() == sin.stride()
    ours = "forward" in vars(self)
    if ours and whole and takes(cos, sin, *weights, rows=(query, key)) and not any(map(has_hooks, norms)):
        eps = norms[0].variance_epsilon if norms else 0.0
        query_weight, key_weight = weights or (None, None)
        return rotary.triton(query, key, cos, sin, query_weight, key_weight, eps, appending())
    if norms:
        query, key = self.q_norm(query), self.k_norm(key)
    apply = sources.names_of(type(self).forward)["apply_rotary_pos_emb"]
    turned: tuple[torch.Tensor, torch.Tensor] = apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    return turned


@dataclass(frozen=True, slots=True)
class Fusion:
    """The modules that run with our forward, and the norms, MLPs, attentions and layers left alone, by class."""

    ours: set[torch.nn.Module] = field(default_factory=set)
    modules: Counter[str] = field(default_factory=Counter)
    left_alone: Counter[str] = field(default_factory=Counter)


def wants_fusion(wanted: bool | None, backend: str, device: torch.device) -> bool:
    """Say whether a model runs fused: by default on the triton backend of a CUDA device."""
    if wanted and backend != "triton":
        raise ConfigError(f"engine.fused must be none or false on the {backend} backend, got true")
    return backend == "triton" and (device.type == "cuda" if wanted is None else wanted)


@contextmanager
def fused(model: Any) -> Iterator[Fusion]:
    """Inside, run the model's known modules with fewer kernels for this thread, and the others unchanged."""
    fusion = Fusion()
    following = _following(model)
    forwards = {module: forward_for(module, following.get(module, ())) for module in model.modules()}
    for module, forward in forwards.items():
        name = type(module).__name__
        if forward is not None:
            fusion.ours.add(module)
            fusion.modules[name] += 1
            module.forward = MethodType(_served_only(forward), module)
        elif name.endswith(REPORTED):
            fusion.left_alone[name] += 1
    try:
        with serving():
            yield fusion
    finally:
        for module, forward in forwards.items():
            if forward is not None:
                del module.forward


def _served_only(forward: Forward) -> Forward:
    # another thread's pass takes the module's own forward
    @wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (forward if served.get() else type(self).forward)(self, *args, **kwargs)

    return run


def _following(model: Any) -> dict[torch.nn.Module, tuple[torch.nn.Module, ...]]:
    # what each layer of a model whose own forward is known gives its sum to: the next one and its norm, or the norm
    nexts_of: dict[torch.nn.Module, tuple[torch.nn.Module, ...]] = {}
    for base in model.modules():
        known = sources.digest(type(base).forward) in sources.PASSES and "forward" not in vars(base)
        if known and all(sources.digest(type(layer).forward) in sources.DECODER_LAYER for layer in base.layers):
            nexts = [*((layer, layer.input_layernorm) for layer in base.layers[1:]), (base.norm,)]
            pairs = zip(base.layers, nexts, strict=True)
            nexts_of |= {layer: after for layer, after in pairs if _is_rms_norm(after[-1])}
    return nexts_of


def forward_for(module: Any, following: Sequence[torch.nn.Module] = ()) -> Forward | None:
    """Return the forward that replaces a module's own; None to leave the module alone. See `layer_forward`."""
    name = type(module).__name__
    if not name.endswith(REPORTED) or "forward" in vars(module):  # of another library, perhaps
        return None
    source_digest = sources.digest(type(module).forward)
    if _is_rms_norm(module):
        return norm_forward
    if source_digest in sources.GATED_MLP:
        silu = type(module.act_fn) in (SiLUActivation, torch.nn.SiLU) and "forward" not in vars(module.act_fn)
        return mlp_forward(module) if silu else None
    if source_digest in sources.DECODER_LAYER and _is_rms_norm(module.post_attention_layernorm):
        return layer_forward(following)
    if source_digest in sources.ATTENTION and _rotates(module):
        return attention_forward(module, sources.ATTENTION[source_digest])
    return None


def _is_rms_norm(module: Any) -> bool:
    # a weight that is split over ranks has another type
    if sources.digest(type(module).forward) not in sources.RMS_NORM or "forward" in vars(module):
        return False
    return type(module.weight) is torch.nn.Parameter and module.weight.numel() <= MAX_ROW


def _rotates(module: Any) -> bool:
    forward = type(module).forward
    if not sources.rotates_halves(forward) or module.head_dim % 2 or module.head_dim > MAX_HEAD:
        return False
    if not sources.ATTENTION[sources.digest(forward)].norms:
        return True
    norms = module.q_norm, module.k_norm
    same = norms[0].variance_epsilon == norms[1].variance_epsilon
    return same and all(map(_is_rms_norm, norms))
