"""Slow-Fast Inference for transformers models: `generate(...)`, `slow_fast(...)`, `SfiConfig`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sfi_core.machine.versions import __version__
from sfi_core.settings.config import SelectorConfig, SfiConfig
from sfi_core.settings.engine import AuditConfig, EngineOptions, Sampling

if TYPE_CHECKING:
    from sfi_core.engine.prompt_cache import PromptCache
    from sfi_core.generation.generate import Result, generate, read_prompt
    from sfi_core.hosts.transformers.session import Session
    from sfi_core.hosts.transformers.slow_fast import custom_generate, slow_fast
    from sfi_core.models.load import load
    from sfi_core.observers.observer import NullObserver

__all__ = [
    "AuditConfig", "EngineOptions", "NullObserver", "PromptCache", "Result", "Sampling", "SelectorConfig", "Session",
    "SfiConfig", "__version__", "custom_generate", "generate", "load", "read_prompt", "slow_fast",
]  # fmt: skip
# imported on first use: these modules import torch or transformers, which would slow `sfi --help` down
_LAZY = {
    "custom_generate": "hosts.transformers.slow_fast",
    "NullObserver": "observers.observer",
    "PromptCache": "engine.prompt_cache",
    "Result": "generation.generate",
    "generate": "generation.generate",
    "load": "models.load",
    "read_prompt": "generation.generate",
    "Session": "hosts.transformers.session",
    "slow_fast": "hosts.transformers.slow_fast",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_LAZY` on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"sfi_core.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, those not yet imported among them."""
    return __all__
