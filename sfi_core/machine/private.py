"""The private names of other packages that sfi_core uses, each because no public name says the same.

`tests/test_private_names.py` lists them, and those of the kernels, and tells when one is gone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def attention_implementation(config: Any) -> str:
    """Return the attention implementation of a model's config.

    transformers documents the argument `attn_implementation` and `set_attn_implementation`, but nothing that
    reads the value back.
    """
    name: str = config._attn_implementation
    return name


class LastOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the last aten operation that was begun inside; the public way to see each one is this class.

    Attributes:
        name: Its name, as `aten::nonzero`; empty before the first.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the operation, and do it."""
        self.name = func.name()
        return func(*args, **(kwargs or {}))


def has_hooks(module: torch.nn.Module) -> bool:
    """Say whether anybody is told of a module's calls.

    PyTorch has functions to add hooks and to remove them, but none to ask for them.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Say whether oneDNN multiplies matrices of a dtype on this CPU; True for other than half precisions.

    `torch.backends.mkldnn` tells whether oneDNN is there, not what it supports.
    """
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in supported or bool(supported[dtype]())


def operators(call: Callable[[], object]) -> list[str]:
    """Run a call and return the names of the ATen operators that it came down to, in order.

    The profiler is public and names them too, but Kineto's writes lines to stderr.
    """
    seen = Operators()
    with seen:
        call()
    return seen.names


class Operators(TorchDispatchMode):
    """Lists the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the name, and run the operator."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
