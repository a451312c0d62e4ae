"""Slow-Fast Inference for transformers models: `generate(...)`, `slow_fast(...)`, `SfiConfig`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sfi_core.config import SfiConfig
from sfi_core.config_parts import SelectorConfig

if TYPE_CHECKING:
    from sfi_core.cpu_linear import pack_weights
    from sfi_core.generation import Result, generate
    from sfi_core.hosting import slow_fast
    from sfi_core.model import load
    from sfi_core.sampling import Sampling
    from sfi_core.session import Session

__version__ = "0.1.0"
__all__ = [
    "Result",
    "Sampling",
    "SelectorConfig",
    "Session",
    "SfiConfig",
    "generate",
    "load",
    "pack_weights",
    "slow_fast",
]
# these import torch or transformers, which `sfi --help` must not
_LAZY = {
    "Result": "generation",
    "generate": "generation",
    "load": "model",
    "pack_weights": "cpu_linear",
    "Sampling": "sampling",
    "Session": "session",
    "slow_fast": "hosting",
}


def __getattr__(name: str) -> Any:
    """Import the heavy names on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"sfi_core.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
