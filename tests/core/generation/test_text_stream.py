"""Tokens become text as they come."""

from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.byt5 import ByT5Tokenizer

from benchmarks.train_bundled import build_tokenizer
from sfi_core.generation.prompts import TextStream

CODE = "def f(x):\n    if x:\n        return '数'\n\n    return  x\n"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# as Llama 2's: one space stands before the first word, and the decoder strips one
STEPS = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
SENTENCE_PIECE = decoders.Sequence([*STEPS, decoders.Strip(" ", 1, 0)])
SPECIAL = {"unk_token": "<unk>", "eos_token": "</s>"}


def llama_2_like() -> PreTrainedTokenizerFast:
    """Make a tokenizer of characters, bytes and indentations whose decoder is SentencePiece's."""
    words = ["<unk>", "</s>", "▁", "▁▁▁▁", *"abcdefghijklmnopqrstuvwxyz():'", *BYTES]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {word: index for index, word in enumerate([*words, "▁▁"])}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = SENTENCE_PIECE
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def encode(tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pushed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*[stream.push(token) for token in ids], stream.end()]


@pytest.mark.parametrize("text", [" Belora hid a lantern.\n\nLater, more", "héllo 数字 ok", "a\nb\nc", CODE])
@pytest.mark.parametrize("make", [lambda: build_tokenizer(64), llama_2_like, ByT5Tokenizer])
def test_the_pieces_add_up_to_the_text(make, text):
    tokenizer = make()
    ids = encode(tokenizer, text)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pushed(TextStream(tokenizer), ids)) == expected


@pytest.mark.parametrize("make", [lambda: build_tokenizer(64), llama_2_like, ByT5Tokenizer])
def test_a_character_split_over_tokens_waits_until_it_is_whole(make):
    tokenizer = make()
    ids, before = encode(tokenizer, "b数"), encode(tokenizer, "b")
    assert len(ids) > len(before) + 1
    given = [piece for piece in pushed(TextStream(tokenizer), ids) if piece]
    assert given == [*"b数"]


@pytest.mark.parametrize("make", [lambda: build_tokenizer(64), llama_2_like])
def test_an_answer_cut_within_a_character_or_of_any_bytes_is_streamed_whole(make):
    tokenizer = make()
    whole = encode(tokenizer, "I 🦊 a\N{REPLACEMENT CHARACTER}")
    random = Random(3)
    cases = [whole[:cut] for cut in range(len(whole) + 1)]
    cases += [[random.randrange(len(tokenizer)) for _ in range(random.randrange(12))] for _ in range(300)]
    for ids in cases:
        assert "".join(pushed(TextStream(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_text_may_begin_with_spaces_of_which_the_decoder_strips_one():
    tokenizer = llama_2_like()
    ids = tokenizer.convert_tokens_to_ids(["▁", "▁", "▁▁▁▁", "x"])
    assert pushed(TextStream(tokenizer), ids) == ["", " ", "    ", "x", ""]


def test_special_tokens_are_no_text():
    tokenizer = llama_2_like()
    ids = tokenizer.convert_tokens_to_ids(["</s>", "a", "</s>", "</s>", "▁", "b", "</s>"])
    assert "".join(pushed(TextStream(tokenizer), ids)) == "a b"


def test_a_byte_waits_for_the_token_after_it():
    """A byte that is no character makes the line's end before it none either."""
    tokenizer = llama_2_like()
    ids = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xE6>", "b", "▁", "c"])
    assert tokenizer.decode(ids) == "a��b c"
    assert pushed(TextStream(tokenizer), ids) == ["a", "", "", "��b", " ", "c", ""]


def test_a_long_line_takes_a_few_decoded_tokens_for_each_token():
    class Counting:
        decoded = 0

        def decode_chain(self, tokens: list[str]) -> list[str]:
            Counting.decoded += len(tokens)
            return [SENTENCE_PIECE.decode(tokens)]

    tokenizer = llama_2_like()
    tokenizer.backend_tokenizer.decoder = decoders.Decoder.custom(Counting())
    ids = tokenizer.convert_tokens_to_ids(["▁", "a", "<0xC3>", "<0xA9>"]) * 250
    assert "".join(pushed(TextStream(tokenizer), ids)) == (" aé" * 250)[1:]
    assert len(ids) < Counting.decoded < 10 * len(ids)
