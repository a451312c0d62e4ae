"""The version of sfi, and the versions of what a run depends on, for reports. Nothing here imports torch."""

import platform
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "numba", "pyarrow", "nvtx")


def versions() -> dict[str, str | None]:
    """Return the installed versions; None for what is not installed."""
    installed: dict[str, str | None] = {"sfi": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed
