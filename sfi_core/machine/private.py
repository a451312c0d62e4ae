"""Private names of other packages, each for lack of a public one; `tests/test_private_names.py` checks them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def attention_implementation(config: Any) -> str:
    """Return the attention implementation of a model's config; transformers documents only how to set it."""
    name: str = config._attn_implementation
    return name


def has_hooks(module: torch.nn.Module) -> bool:
    """Say whether a module has forward hooks; PyTorch can add and remove hooks, but not list them.

    Those do not count that transformers leaves in a model once it has been asked for hidden states.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Say whether oneDNN multiplies matrices of a dtype on this CPU; True for other than half precisions."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in supported or bool(supported[dtype]())


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the names of the ATen operators that run inside; the public profiler's Kineto would write to stderr."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.last = ""  # the full name of the last one to begin, such as `aten::nonzero`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operator's name and run it."""
        self.last = func.name()
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
