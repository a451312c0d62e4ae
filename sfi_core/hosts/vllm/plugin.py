"""The entry point that vLLM calls in each process; under another version of vLLM it does nothing."""

import importlib
import logging

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm.versions import check_version, installed_version

logger = logging.getLogger(__name__)


def register(module: str = "sfi_core.hosts.vllm.connector") -> None:
    """Register connector and backends, as often as called; `module` has the connector's class."""
    try:
        check_version()
    except ConfigError as error:
        logger.warning("sfi stays out: %s", error)
        return
    try:  # not before: another version may lack the names
        seams = importlib.import_module("sfi_core.hosts.vllm.seams")
    except ImportError as error:
        logger.warning("sfi stays out: vLLM %s lacks a name: %s", installed_version(), error)
        return
    seams.register(module)
