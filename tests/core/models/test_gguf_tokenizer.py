"""Tokenizers of the SentencePiece kind, from the metadata of a GGUF file."""

import random
from itertools import pairwise

import pytest

from sfi_core.models.gguf_tokenizer import build_tokenizer, stop_ids

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [*"abcde\u2581."]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def metadata(**changes):
    """Tokens of up to four letters with scores in a random order, as SentencePiece has learned them."""
    draw = random.Random(3)
    formed = sorted({"".join(draw.choices(LETTERS, k=draw.randint(2, 4))) for _ in range(150)})
    plain = [*LETTERS, *formed]
    scores = draw.sample(range(len(plain)), len(plain))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<turn>", *BYTES, *plain],
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(score) for score in scores],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, USER, *[BYTE] * 256, *[NORMAL] * len(plain)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def sentencepiece(text, facts):
    """Merge the neighbours that form the token of the best score, the leftmost first, until none do."""
    tokens = facts["tokenizer.ggml.tokens"]
    score = dict(zip(tokens, facts["tokenizer.ggml.scores"], strict=True))
    parts = list(text.replace(" ", "\u2581"))
    while pairs := [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]:
        _, place = min(pairs)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    spelled = [[part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [tokens.index(token) for some in spelled for token in some]


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_is_merged_as_sentencepiece_merges_it(begins):
    facts, draw = metadata(add_space_prefix=begins), random.Random(5)
    tokenizer = build_tokenizer(facts)
    for _ in range(60):
        text = "".join(draw.choices([*"abcde .", "\u00e9", "\U0001f9a9"], [8] * 7 + [1, 1], k=draw.randint(1, 30)))
        ids = tokenizer(text).input_ids
        assert ids == [1, *sentencepiece(" " * begins + text, facts)]
        assert tokenizer.decode(ids[1:]) == text


def test_control_and_user_defined_tokens_are_found_in_a_text():
    tokenizer = build_tokenizer(metadata(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer("a<turn>b</s>").input_ids
    assert (ids[1], ids[3]) == (3, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<turn>b"


@pytest.mark.parametrize(
    ("texts", "ids", "stops"),
    [
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, [1, 2]),
        (["a", "b", "c"], {"eos": 2, "eot": 1, "eom": 0}, [2, 1, 0]),
        (["a", "<|end|>", "<|return|>", "<|call|>"], {"eos": 2}, [2, 3]),
        (["a", "<|end|>"], {}, [1]),
        (["a", "</s>"], {"eos": 9, "eot": -1, "eom": "x"}, []),
    ],
)
def test_what_ends_an_answer(texts, ids, stops):
    """`</s>` is a plain token of Qwen, and `<|end|>` ends but a message where answers have several."""
    facts = {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    assert stop_ids({"tokenizer.ggml.tokens": texts, **facts}) == stops


def test_another_kind_and_lists_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"must be SentencePiece's or byte-level BPE .* got 't5' split as None"):
        build_tokenizer(metadata(model="t5"))
    for name, what in (("scores", "scores"), ("token_type", "token types")):
        with pytest.raises(ValueError, match=f"its tokenizer must have {what} for all"):
            build_tokenizer(metadata(**{name: [1]}))
