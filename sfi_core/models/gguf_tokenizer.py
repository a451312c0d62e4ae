"""The tokenizer that a GGUF file describes: byte-level BPE, or SentencePiece's.

transformers 5.17 makes one too, but for a Llama it splits every text as GPT-2 does, confuses the token that begins a
text with the one that ends it, and leaves a SentencePiece without merges: every word falls into letters.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens; the last two are found in a text before it is split
SPACE = "\u2581"
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
    kind, pre, tokens = facts.get("model"), facts.get("pre"), facts.get("tokens", [])
    if kind == "llama":
        backend, begins = _sentencepiece(facts), True
    elif kind == "gpt2" and pre in SPLITS:
        backend, begins = _byte_level(facts, pre), pre == "llama-bpe"
    else:
        raise ValueError(
            f"its tokenizer must be SentencePiece's or byte-level BPE split as one of {tuple(SPLITS)}, got {kind!r} "
            f"split as {pre!r}; put the model's tokenizer.json beside the file"
        )
    backend.add_tokens(
        [  # runs of spaces are looked for where spaces are written so already
            AddedToken(token, normalized=set(token) == {SPACE}, special=type_ == CONTROL)
            for token, type_ in zip(tokens, facts["token_type"], strict=True)
            if type_ in (CONTROL, USER_DEFINED)
        ]
    )
    if bos is not None and facts.get("add_bos_token", begins):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    return backend


def _byte_level(facts: Mapping[str, Any], pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in facts["merges"]]
    backend = Tokenizer(models.BPE(_numbers(facts), merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = SPLITS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(facts: Mapping[str, Any]) -> Tokenizer:
    # spaces are written as a letter of their own, and what no token has as bytes
    unknown = facts["tokens"][facts.get("unknown_token_id", 0)]
    model = models.BPE(_numbers(facts), _merges(facts), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    begins = bool(facts.get("add_space_prefix", True))
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if begins else []), normalizers.Replace(" ", SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if begins else []),
        ]
    )  # fmt: skip
    return backend


def _merges(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    # the file has each token's score and no merges: two tokens merge by the score of what they form
    numbers, found = _numbers(facts), []
    for token, score, type_ in zip(facts["tokens"], facts["scores"], facts["token_type"], strict=True):
        if type_ == NORMAL:
            parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            found += [(-score, numbers[a], numbers[b], (a, b)) for a, b in parts if a in numbers and b in numbers]
    return [pair for *_, pair in sorted(found)]


def _numbers(facts: Mapping[str, Any]) -> dict[str, int]:
    return {token: number for number, token in enumerate(facts["tokens"])}
