"""Versions of what a run depends on, for reports."""

import platform
from importlib.metadata import PackageNotFoundError, version

from sfi_core import __version__

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "pyarrow", "nvtx")


def versions() -> dict[str, str | None]:
    """Return the installed versions; None for what is not installed."""
    found: dict[str, str | None] = {"sfi": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
