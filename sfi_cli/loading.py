"""`--pack-weights`."""

from functools import partial
from typing import Any

from sfi_cli.terminal.progress import BenchProgress


def check_packing(loading: dict[str, Any]) -> None:
    """Refuse what cannot be packed before a large model loads.

    Args:
        loading: `load`'s options.

    Raises:
        SfiError: What the user can mend.
    """
    import torch

    from sfi_core.models import linear
    from sfi_core.models.load import resolve_device, resolve_dtype

    dtype = resolve_dtype(loading["dtype"])
    known = (
        dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    )  # auto shows when it is loaded
    linear.check_packing(resolve_device(loading["device"]), known)


def pack(model: Any, *, quiet: bool) -> None:
    """Pack a model's weights, with progress."""
    from sfi_core.models.linear import pack_weights

    with BenchProgress(quiet=quiet) as progress:
        pack_weights(model, partial(progress.update, "packing the weights"))
