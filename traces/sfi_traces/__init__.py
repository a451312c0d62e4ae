"""Traces of a run: the observers that record one, and what reads, replays and tunes from it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfi_traces.model.trace import Trace
    from sfi_traces.record.parquet import ParquetObserver

__all__ = ["ParquetObserver", "Trace"]
# these import pyarrow or torch, which `sfi --help` must not
_LAZY = {"ParquetObserver": "record.parquet", "Trace": "model.trace"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"sfi_traces.{_LAZY[name]}"), name)
