"""GGUF files: how transformers loads them fast, what it drops without a word, and their tokenizers.

transformers 5.17 makes a tokenizer too, but for a Llama it splits every text as GPT-2 does, and confuses the
token that begins a text with the one that ends it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import cache
from importlib.util import find_spec
from io import StringIO
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from sfi_core.errors import not_installed

DTYPE = torch.float32  # what "auto" makes of quantized weights
PACKAGES = ("gguf", "accelerate")  # transformers asks for both


def check_packages() -> None:
    """Raise `BackendError` where a package that reads GGUF files is missing."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise not_installed("GGUF files need", package, "gguf")


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers parse a file once, not once a use, and without a progress bar.

    A parse takes seconds, mostly for the vocabulary; transformers also works out the names of all tensors
    anew for each of the model's modules.
    """
    import gguf  # noqa: PLC0415 - of an extra

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in slow.items():
            setattr(gguf, name, cache(function))
        with redirect_stderr(StringIO()):
            yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def read_metadata(place: str, file: str, revision: str | None) -> dict[str, Any]:
    """Return a file's metadata; under `tensors` the names of its tensors.

    Raise `OSError` for a missing file, `ValueError` for a file that is not GGUF.
    """
    import gguf  # noqa: PLC0415 - of an extra

    reader = gguf.GGUFReader(cached_file(place, file, revision=revision))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return {**metadata, "tensors": [tensor.name for tensor in reader.tensors]}


def check_positions(config: Any, metadata: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a file scales positions and transformers dropped the scaling."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != "default":
        return
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    factors = [name for name in metadata["tensors"] if name.startswith("rope_")]
    if scaling != "none" or factors:
        what = f"rope scaling {scaling!r}" if scaling != "none" else factors[0]
        raise ValueError(
            f"its positions are scaled ({what}), which transformers does not read from a GGUF file; "
            "use the model's folder or hub id"
        )


CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found in a text before it is split
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt4(digits: str) -> PreTokenizer:
    split = Split(Regex(GPT4 % digits), "isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


# by `tokenizer.ggml.pre`, llama.cpp's name of how a text is split before the merges
SPLITS: dict[str, PreTokenizer] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": _gpt4(r"\p{N}{1,3}"),
    "qwen2": _gpt4(r"\p{N}"),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a file's metadata describes; raise `ValueError` for an unknown kind."""
    facts = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    tokens = facts.get("tokens", [])
    special = {
        f"{role}_token": tokens[facts[f"{name}_token_id"]]
        for role, name in ROLES.items()
        if f"{name}_token_id" in facts
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(facts, special.get("bos_token")),
        chat_template=metadata.get("tokenizer.chat_template"),
        padding_side="left",
        **special,
    )


def _backend(facts: Mapping[str, Any], bos: str | None) -> Tokenizer:
    kind, pre = facts.get("model"), facts.get("pre")
    if kind != "gpt2" or pre not in SPLITS:
        raise ValueError(
            f"its tokenizer must be byte-level BPE split as one of {tuple(SPLITS)}, got {kind!r} split as "
            f"{pre!r}; put the model's tokenizer.json beside the file"
        )
    tokens, llama = facts["tokens"], pre == "llama-bpe"
    backend = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in facts["merges"]],
            ignore_merges=llama,
        )
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = SPLITS[pre]
    backend.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, facts["token_type"], strict=True):
        if type_ in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=False, special=type_ == CONTROL)])
    if bos is not None and facts.get("add_bos_token", llama):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    return backend
