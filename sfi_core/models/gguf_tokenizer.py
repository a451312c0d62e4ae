"""The tokenizer that a GGUF file describes: byte-level BPE, or SentencePiece's.

transformers 5.17 makes one too, but for a Llama it splits every text as GPT-2 does, confuses the token that begins a
text with the one that ends it, and leaves a SentencePiece without merges: every word falls into letters.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens; the last two are found in a text before it is split
LONGEST = 1024  # letters of a token whose parts are looked for, which takes the square of them
GGML = "tokenizer.ggml."
SPACE = "\u2581"
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message
# tokens that end an answer whatever a file says, as llama.cpp has them: many a file names `eos` alone
ENDING_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>",
    "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
})  # fmt: skip
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


def special_ids(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the tokens that a file names, as `bos`, by these names; those outside its vocabulary are left out."""
    count = len(metadata.get("tokenizer.ggml.tokens", ()))
    given = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    return {name: token for name, token in given.items() if type(token) is int and 0 <= token < count}


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: a file's `eos` first."""
    ends = dict.fromkeys(special_ids(metadata, ENDS).values())
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    texts = {text: number for number, text in enumerate(tokens) if text in ENDING_TEXTS}
    if {"<|return|>", "<|call|>"} <= texts.keys() or {"<|flush|>", "<|calls|>"} <= texts.keys():
        ends.pop(texts.pop("<|end|>", -1), None)  # there it ends a message, and the answer goes on
    return [*(ends | dict.fromkeys(texts.values()))]


def set_tokens(config: Any, metadata: Mapping[str, Any]) -> None:
    """Give a config the special tokens of its file; transformers takes all as they are, and `eos` alone as an end."""
    if "tokenizer.ggml.tokens" not in metadata:
        return
    special, stops = special_ids(metadata, ROLES.values()), stop_ids(metadata)
    config.bos_token_id, config.pad_token_id = special.get("bos"), special.get("padding")
    config.eos_token_id = stops if len(stops) > 1 else stops[0] if stops else None


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a file's metadata describes; raise `ValueError` for an unknown kind."""
    facts = {name.removeprefix(GGML): value for name, value in metadata.items() if name.startswith(GGML)}
    _check_lists(facts)
    ids = special_ids(metadata, ROLES.values())
    tokens = {f"{role}_token": facts["tokens"][ids[name]] for role, name in ROLES.items() if name in ids}
    backend: Any = _backend(facts, tokens.get("bos_token"))
    backend.__deepcopy__ = lambda _: backend  # transformers would copy it, which takes as long as building it
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), padding_side="left", **tokens
    )
    del backend.__deepcopy__
    return tokenizer


def _check_lists(facts: Mapping[str, Any]) -> None:
    count = len(facts.get("tokens", ()))
    if not count:
        raise ValueError("it has no tokenizer; put the model's tokenizer.json beside the file")
    needed = {"token_type": "token types", **({"scores": "scores"} if facts.get("model") == "llama" else {})}
    for name, what in needed.items():
        if len(facts.get(name, ())) != count:
            raise ValueError(
                f"its tokenizer must have {what} for all {count:,} tokens, got {len(facts.get(name, ())):,}; "
                "put the model's tokenizer.json beside the file"
            )
    if facts.get("model") == "llama" and max(map(len, facts["tokens"])) > LONGEST:
        raise ValueError(f"its tokens must have {LONGEST} letters at most, got {max(map(len, facts['tokens'])):,}")


def _backend(facts: Mapping[str, Any], bos: str | None) -> Tokenizer:
    kind, pre, tokens = facts.get("model"), facts.get("pre"), facts["tokens"]
    numbers = {token: number for number, token in enumerate(tokens)}
    if kind == "llama":
        backend, begins = _sentencepiece(facts, numbers), True
    elif kind == "gpt2" and pre in SPLITS:
        backend, begins = _byte_level(facts, numbers, pre), pre == "llama-bpe"
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


def _byte_level(facts: Mapping[str, Any], numbers: dict[str, int], pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in facts["merges"]]
    backend = Tokenizer(models.BPE(numbers, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = SPLITS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(facts: Mapping[str, Any], numbers: dict[str, int]) -> Tokenizer:
    tokens, number = facts["tokens"], numbers.get
    # the file has each token's score and no merges: two tokens merge by the score of what they form
    scored = sorted(
        (-score, left, right)
        for token, score, type_ in zip(tokens, facts["scores"], facts["token_type"], strict=True)
        if type_ == NORMAL
        for cut in range(1, len(token))
        if (left := number(token[:cut])) is not None and (right := number(token[cut:])) is not None
    )
    merges = [(tokens[left], tokens[right]) for _, left, right in scored]
    unknown = tokens[facts.get("unknown_token_id", 0)]
    # what no token has is written as bytes, and spaces as a letter of their own
    backend = Tokenizer(models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    encode: list[Any] = [normalizers.Replace(" ", SPACE)]
    decode: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if facts.get("add_space_prefix", True):
        encode.insert(0, normalizers.Prepend(SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(encode), decoders.Sequence(decode)
    return backend
