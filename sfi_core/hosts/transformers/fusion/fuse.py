"""`fused(model)`: run modules whose source is known with fewer kernels."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from transformers.activations import SiLUActivation

from sfi_core.engine.report import RunReport
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.fusion import forwards
from sfi_core.hosts.transformers.fusion import known as sources
from sfi_kernels.rms_norm import MAX_WIDTH as MAX_NORM
from sfi_kernels.rotary import MAX_WIDTH as MAX_HEAD

Forward = Callable[..., Any]
# classes with these names are told of where they keep their own forward
TOLD = ("Norm", "MLP", "Attention", "DecoderLayer")


@dataclass(frozen=True, slots=True)
class Fusion:
    """The modules that run with our forward, and those left alone, counted by class.

    `left_alone` counts norms, MLPs, attentions and decoder layers only.
    """

    modules: Counter[str] = field(default_factory=Counter)
    left_alone: Counter[str] = field(default_factory=Counter)

    def told(self, report: RunReport) -> RunReport:
        """Return a run's report with the fused modules added."""
        return replace(report, fused=dict(self.modules), left_alone=dict(self.left_alone))


def wants_fusion(wanted: bool | None, backend: str, device: torch.device) -> bool:
    """Say whether a model runs fused: by default on the triton backend of a CUDA device."""
    if wanted and backend != "triton":
        raise ConfigError(f"engine.fused must be none or false on the {backend} backend, got true")
    return backend == "triton" and (device.type == "cuda" if wanted is None else wanted)


@contextmanager
def fused(model: Any) -> Iterator[Fusion]:
    """Inside, run the model's known modules with fewer kernels, and the others unchanged."""
    fusion = Fusion()
    found = {module: forward_for(module) for module in model.modules()}
    for module, forward in found.items():
        name = type(module).__name__
        if forward is not None:
            fusion.modules[name] += 1
            module.forward = MethodType(forward, module)
        elif name.endswith(TOLD):
            fusion.left_alone[name] += 1
    try:
        yield fusion
    finally:
        for module, forward in found.items():
            if forward is not None:
                del module.forward


def forward_for(module: Any) -> Forward | None:
    """Return the forward that replaces a module's own; None to leave the module alone."""
    name = type(module).__name__
    if not name.endswith(TOLD) or "forward" in vars(module):  # of another library, perhaps
        return None
    known = sources.digest(type(module).forward)
    if _is_rms_norm(module):
        return forwards.norm_forward
    if known in sources.GATED_MLP and _is_silu(module.act_fn):
        return forwards.mlp_forward
    if known in sources.DECODER_LAYER and _is_rms_norm(module.post_attention_layernorm):
        return forwards.layer_forward
    if known in sources.ATTENTION and _rotates(module):
        return forwards.attention_forward(sources.ATTENTION[known])
    return None


def _is_silu(module: Any) -> bool:
    return type(module) in (SiLUActivation, torch.nn.SiLU) and "forward" not in vars(module)


def _is_rms_norm(module: Any) -> bool:
    # a weight that is split over ranks has another type
    if sources.digest(type(module).forward) not in sources.RMS_NORM or "forward" in vars(module):
        return False
    return type(module.weight) is torch.nn.Parameter and module.weight.numel() <= MAX_NORM


def _rotates(module: Any) -> bool:
    forward = type(module).forward
    if not sources.rotates_halves(forward) or module.head_dim % 2 or module.head_dim > MAX_HEAD:
        return False
    if not sources.ATTENTION[sources.digest(forward)].norms:
        return True
    norms = module.q_norm, module.k_norm
    same = norms[0].variance_epsilon == norms[1].variance_epsilon
    return same and all(map(_is_rms_norm, norms))
