"""The engine that serves an attention layer in this process."""

from typing import Any

from sfi_core.hosts.vllm import CONNECTOR
from sfi_core.hosts.vllm.connector import SfiConnector
from sfi_core.hosts.vllm.names import get_kv_transfer_group, has_kv_transfer_group
from sfi_core.hosts.vllm.worker import WorkerEngine


def planned_engine() -> WorkerEngine | None:
    """Return the process's engine within a planned forward pass; None in dummy passes and without sfi."""
    engine = engine_of_process()
    return engine if engine is not None and engine.planned else None


def engine_of_process() -> WorkerEngine | None:
    """Return the process's engine; None before vLLM has its caches, and without sfi."""
    if not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    return group.engine if isinstance(group, SfiConnector) else None


def is_configured(vllm_config: Any) -> bool:
    """Say whether vLLM's settings name our connector; one among several is refused later."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR
