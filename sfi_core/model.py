"""Loading a checkpoint and its tokenizer."""

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sfi_core.errors import BackendError, ConfigError, InputError, UnsupportedModelError

BUNDLED = Path(__file__).parent / "bundled" / "checkpoint"
DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def load(
    model: str | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a decoder-only model and its tokenizer.

    Args:
        model: Hub id or folder; None is the bundled checkpoint.
        revision: Branch, tag or commit on the hub.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1", ...
        trust_remote_code: Run code that comes with the checkpoint.

    Returns:
        The model in evaluation mode, and the tokenizer.

    Raises:
        InputError: The checkpoint is missing, incomplete or damaged.
        UnsupportedModelError: No decoder-only language model.
        BackendError: The device is not there.
    """
    quiet()
    source = str(BUNDLED if model is None else model)
    where, kind = resolve_device(device), resolve_dtype(dtype)
    _check_folder(source)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **common)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{source} is an encoder-decoder model ({config.model_type}); sfi runs decoder-only models"
            )
        known = AutoModelForCausalLM._model_mapping  # noqa: SLF001 - nothing public says it
        if type(config) not in known and not trust_remote_code:
            raise UnsupportedModelError(
                f"{source} ({config.model_type}) is no causal language model"
            )
        loaded, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=kind,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the weight's name
            **common,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise InputError(f"model {source} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"model {source} lacks {len(missing)} weights, among them {missing[0]}")
    if odd := sorted(info["mismatched_keys"]):
        name, got, wanted = odd[0]
        raise InputError(
            f"model {source} has {len(odd)} weights of another shape than its config says, "
            f"among them {name}, which must be {list(wanted)}, got {list(got)}"
        )
    return loaded.to(where).eval(), tokenizer


def load_tokenizer(model: str | None = None) -> Any:
    """Load a model's tokenizer alone.

    Raises:
        InputError: It is missing or damaged.
    """
    quiet()
    source = str(BUNDLED if model is None else model)
    _check_folder(source)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"tokenizer of {source} cannot be loaded: {first_line(error)}") from error


def _check_folder(source: str) -> None:
    folder = Path(source)
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"model must be a folder or a hub id, got the file {source}")
        if source.startswith((".", "~")) or folder.is_absolute() or source.count("/") > 1:
            raise InputError(f"model folder {source} does not exist")
        return
    if not (folder / "config.json").exists():
        raise InputError(f"model folder {source} has no config.json")
    tokenizers = (
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "tekken.json",
        "vocab.txt",
        "spiece.model",
    )
    if not any((folder / name).exists() for name in tokenizers):
        raise InputError(f"model folder {source} has no tokenizer; save one there")


def first_line(error: Exception) -> str:
    """Return an error's first line, without its final stop; two lines where a colon ends the first."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


def quiet() -> None:
    """Keep transformers' own bars and warnings off the terminal."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def resolve_dtype(name: str) -> torch.dtype | str:
    """Turn a dtype's name into the dtype.

    Raises:
        ConfigError: Unknown.
    """
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; expected one of {('auto', *DTYPES)}")
    return DTYPES.get(name, "auto")


def resolve_device(name: str) -> torch.device:
    """Turn a device's name into the device.

    Raises:
        ConfigError: No such kind of device.
        BackendError: It is not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # refused like the kinds that sfi does not run on
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; expected one of ('auto', 'cpu', 'cuda')")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BackendError(
            f"device {name} is not on this machine, which has {count} CUDA devices; use cpu"
        )
    return device
