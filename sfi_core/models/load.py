"""Loading a checkpoint and its tokenizer, on one device or split by heads with transformers' tensor parallelism."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

from sfi_core import distributed as torchrun
from sfi_core.distributed.ranks import join, mesh
from sfi_core.errors import BackendError, ConfigError, InputError, SfiError, UnsupportedModelError, unknown
from sfi_core.machine.text import first_line, shown
from sfi_core.models.gguf_blocks import GgufBlocks
from sfi_core.models.gguf_file import DTYPE, check_positions, read_metadata
from sfi_core.models.gguf_tokenizer import build_tokenizer, set_tokens
from sfi_core.models.linear import round_weights, why_no_blocks
from sfi_core.models.source import Source, find_source, source_digest
from sfi_core.settings.engine import WEIGHTS

BUNDLED = Path(__file__).parents[1] / "bundled" / "checkpoint"
# the most that a config may say: a model of more would take minutes and gigabytes before it is refused
MOST = {
    "num_hidden_layers": 2048, "hidden_size": 1 << 18, "intermediate_size": 1 << 20, "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14, "head_dim": 1 << 14,
}  # fmt: skip
DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "float32": torch.float32, "fp32": torch.float32,
}  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model")
SPLIT = "colwise"  # the style of a projection whose heads stay on their ranks


def load(
    model: str | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    weights: str = "auto",
    check: Callable[[Any], None] | None = None,
) -> tuple[Any, Any]:
    """Load a decoder-only model, in evaluation mode, and its tokenizer; under torchrun, split by heads over all ranks.

    Args:
        model: Hub id, folder, GGUF file or alias (see `find_source`); None is the bundled checkpoint.
        revision: Branch, tag or commit on the hub.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", ...
        trust_remote_code: Run code that comes with the checkpoint.
        weights: "auto" (a GGUF file's matrices stay its blocks on a CPU, in float32), "floats" (they are unpacked), or
            "int8": on a CPU all matrices are rounded to 8 bits, with a scale for 32 numbers.
        check: May refuse the checkpoint's config before its weights are read.

    Raises:
        InputError: The checkpoint is missing, incomplete or damaged.
        UnsupportedModelError: No decoder-only language model, or one that torchrun's ranks cannot share.
        BackendError: The device, or a package that the checkpoint needs, is missing.
        ConfigError: The ranks have different checkpoints.
        RankLostError: Another rank has died.
    """
    quiet()
    where, kind = resolve_device(device), resolve_dtype(dtype)
    check_weights(weights, where, kind)
    if weights == "int8":
        kind = DTYPE
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    together = join()
    with together.agreed():
        source = find_source(str(BUNDLED if model is None else model))
        if source.gguf is not None and together.size > 1:
            raise UnsupportedModelError(
                f"{source.name} is a GGUF file, which {together.size} ranks cannot share; use its folder or hub id"
            )
    with source.opened():
        with together.agreed(), readable(f"model {source.name}"):
            _check_place(source)
            config = _decoder_config(source, common)
            digest = source_digest(source, revision) if together.size > 1 else None
            split = parallel_options(config, together.size, trust_remote_code=trust_remote_code)
            if check is not None:
                check(config)
        together.check_same({"model": digest, "dtype": dtype, "device": where.type})
        if split:
            split["device_mesh"] = mesh(where)
        with together.agreed(), readable(f"model {source.name}"):
            tokenizer = _tokenizer(source, **common)  # before the weights, which take longer
            blocks = GgufBlocks()
            why = "asked for floats" if weights == "floats" else "not float32 on a CPU"
            if source.gguf is not None and kind in ("auto", DTYPE) and where.type == "cpu" and weights == "auto":
                why = why_no_blocks()
            # mismatched sizes are refused below, with the weight's name
            reading = {"config": config, "dtype": kind, "output_loading_info": True, "ignore_mismatched_sizes": True}
            with nullcontext() if source.gguf is None or why else blocks.taken():
                loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                    source.place, **reading, **source.weights, **common, **split
                )
            _check_complete(source.name, info)
            if source.gguf is not None:
                blocks.into(loaded, why)
            if weights == "int8":
                round_weights(loaded)
    loaded.config.name_or_path = source.name  # transformers has the folder of a GGUF file
    loaded.sfi_origin = (source, revision)  # for `model_digest`
    return loaded.to(where).eval(), tokenizer


@contextmanager
def readable(what: str, verb: str = "loaded") -> Iterator[None]:
    """Turn what a checkpoint's readers raise into `BackendError` for a missing package, else `InputError`."""
    try:
        yield
    except SfiError:
        raise
    except ImportError as error:
        raise BackendError(f"{what} needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:
        raise InputError(f"{what} cannot be {verb}: {first_line(error)}") from error


def read_config(source: Source, revision: str | None = None, **options: Any) -> Any:
    """Return a checkpoint's config; that of a GGUF file also says which dtype "auto" is."""
    metadata = {} if source.gguf is None else read_metadata(source.place, source.gguf, revision)
    config = transformers.AutoConfig.from_pretrained(source.place, revision=revision, **source.options, **options)
    if source.gguf is not None:
        check_positions(config, metadata)
        set_tokens(config, metadata)
        config.dtype = DTYPE
    text = config.get_text_config(decoder=True)
    for name, most in MOST.items():
        size = getattr(text, name, None)
        if isinstance(size, int) and not 1 <= size <= most:
            raise ValueError(f"{name} must be in 1 to {most:,}, got {shown(size)}")
    return config


def _decoder_config(source: Source, common: dict[str, Any]) -> Any:
    config = read_config(source, **common)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{source.name} is an encoder-decoder model ({config.model_type}); sfi runs decoder-only models"
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not common["trust_remote_code"]:
        raise UnsupportedModelError(f"{source.name} ({config.model_type}) is no causal language model")
    return config


def _check_complete(source: str, info: dict[str, Any]) -> None:
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"model {source} lacks {len(missing)} weights, among them {missing[0]}")
    if odd := sorted(info["mismatched_keys"]):
        name, got, wanted = odd[0]
        raise InputError(
            f"model {source} has {len(odd)} weights of another shape than its config says, "
            f"among them {name}, which must be {list(wanted)}, got {list(got)}"
        )


def load_tokenizer(model: str | None = None, revision: str | None = None, **options: Any) -> Any:
    """Load a model's tokenizer alone; `options` are transformers' own, errors those of `load`."""
    quiet()
    source = find_source(str(BUNDLED if model is None else model))
    _check_place(source)
    with readable(f"tokenizer of {source.name}"), source.opened():
        return _tokenizer(source, revision, **options)


def _tokenizer(source: Source, revision: str | None = None, **options: Any) -> Any:
    if source.gguf is None or (Path(source.place) / "tokenizer.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(source.place, revision=revision, **options)
    return build_tokenizer(read_metadata(source.place, source.gguf, revision))


def _check_place(source: Source) -> None:
    place, folder = source.place, Path(source.place)
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"model must be a folder, a hub id or a .gguf file, got the file {place}")
        check_exists("model folder", place)
    if source.gguf or not folder.is_dir():
        return
    if not (folder / "config.json").exists():
        file = next(folder.glob("*.gguf"), None)
        hint = f"; for its GGUF file say {place}:{file.name}" if file else ""
        raise InputError(f"model folder {place} has no config.json{hint}")
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise InputError(f"model folder {place} has no tokenizer; save one there")


def check_exists(what: str, place: str) -> None:
    """Raise `InputError` for a path that is not there; a hub id passes."""
    path = Path(place)
    if not path.exists() and (place.startswith((".", "~")) or path.is_absolute() or place.count("/") > 1):
        raise InputError(f"{what} {place} does not exist")


def quiet() -> None:
    """Keep transformers' progress bars and warnings off the terminal."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def resolve_dtype(name: str) -> torch.dtype | str:
    """Turn a dtype's name into the dtype; raise `ConfigError` for an unknown name."""
    if name != "auto" and name not in DTYPES:
        raise unknown("dtype", name, ("auto", *DTYPES))
    return DTYPES.get(name, "auto")


def check_weights(weights: str, device: torch.device, dtype: torch.dtype | str) -> None:
    """Raise `ConfigError` for unknown weights, `BackendError` for int8 but in float32 on one CPU's compiled loops."""
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if weights != "int8":
        return
    if device.type != "cpu" or dtype not in ("auto", DTYPE):
        got = f"{str(dtype).removeprefix('torch.')} on {device.type}"
        raise BackendError(f"weights=int8 must be in float32 on a CPU, got {got}")
    if torchrun.size() > 1:
        raise BackendError(f"weights=int8 cannot be split over ranks, got {torchrun.size()}")
    if why := why_no_blocks():
        raise BackendError(f"weights=int8 must have compiled loops, got {why}")


def resolve_device(name: str) -> torch.device:
    """Turn a device's name into the device; under torchrun into a rank's own. Raise `ConfigError` or `BackendError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if torchrun.size() > 1 and name.startswith("cuda"):
        if name != "cuda":
            raise ConfigError(f"device must be auto, cpu or cuda under torchrun, got {name}")
        name = f"cuda:{torchrun.local()}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # refused like the kinds that sfi does not run on
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; expected one of ('auto', 'cpu', 'cuda')")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BackendError(f"device {name} is not on this machine, which has {count} CUDA devices; use cpu")
    return device


def parallel_options(config: Any, size: int, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return `from_pretrained`'s arguments to split a model, but for the device mesh; raise `UnsupportedModelError`."""
    if size == 1:
        return {}
    text = config.get_text_config(decoder=True)
    check_split(config, text.base_model_tp_plan or {}, size)
    plan: Any = "auto"
    if text.vocab_size % size:  # transformers refuses to split such a vocabulary: the head stays whole
        with torch.device("meta"):
            twin = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        heads = twin.get_output_embeddings(), twin.get_input_embeddings()  # where tied, they split as one
        whole = {name for name, module in twin.named_modules() if module in heads}
        plan = {module: style for module, style in twin.tp_plan.items() if module not in whole}
    return {"distributed_config": DistributedConfig(tp_plan=plan, tp_size=size)}


def check_split(config: Any, plan: dict[str, str], size: int) -> None:
    """Raise `UnsupportedModelError` unless a model's attention splits by heads into `size` equal parts."""
    name, text = config.model_type, config.get_text_config(decoder=True)
    if not plan:
        raise UnsupportedModelError(
            f"{name} must have a tensor-parallel plan in transformers to run on {size} ranks, got none"
        )
    if not any(style == SPLIT and "att" in module for module, style in plan.items()):
        raise UnsupportedModelError(
            f"{name} must split its attention by heads to run on {size} ranks; "
            "its tensor-parallel plan shows every rank all of them"
        )
    # every kind of heads there is: some architectures have other numbers in some layers
    for field, heads in text.to_dict().items():
        if field.endswith("heads") and isinstance(heads, int) and heads % size:
            raise UnsupportedModelError(f"{field} must be a multiple of the {size} ranks, got {heads}")
