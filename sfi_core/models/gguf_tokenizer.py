"""The tokenizer of a GGUF file, from its metadata.

transformers 5.17 makes one too, but for a Llama it splits every text as GPT-2 does, and confuses the token
that begins a text with the one that ends it.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

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
