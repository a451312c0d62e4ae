"""vLLM's attention on GPUs with sfi in front; vLLM's flags choose it, see `attention_flags`.

It has not run on a GPU.
"""

from sfi_core.hosts.vllm.cuda_names import bases
from sfi_core.hosts.vllm.paged_backend import PagedBackend, PagedBuilder, PagedImpl

_Backend, _Builder, _Impl = bases()


class SfiCudaBuilder(PagedBuilder, _Builder):  # type: ignore[misc, valid-type]
    """Makes the metadata."""


class SfiCudaImpl(PagedImpl, _Impl):  # type: ignore[misc, valid-type]
    """Attends."""


class SfiCudaBackend(PagedBackend, _Backend):  # type: ignore[misc, valid-type]
    """The backend that vLLM's registry has as `CUSTOM`."""

    @staticmethod
    def get_impl_cls() -> type[SfiCudaImpl]:
        """Return the implementation."""
        return SfiCudaImpl

    @staticmethod
    def get_builder_cls() -> type[SfiCudaBuilder]:
        """Return the builder."""
        return SfiCudaBuilder
