"""Register the connector and the attention backends with vLLM."""

from contextlib import suppress

from sfi_core.hosts.vllm import CONNECTOR
from sfi_core.hosts.vllm.names import AttentionBackendEnum, KVConnectorFactory, register_backend

CPU_BACKEND = "sfi_core.hosts.vllm.cpu_backend.SfiCpuBackend"
CUDA_BACKEND = "sfi_core.hosts.vllm.cuda_backend.SfiCudaBackend"


def register(module: str) -> None:
    """Register connector and backends, as often as called; `module` has the connector's class."""
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    with suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector(CONNECTOR, module, CONNECTOR)
