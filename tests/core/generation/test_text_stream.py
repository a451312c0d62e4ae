"""Tokens become text as they come."""

import pytest

from sfi_core.bundled.tokenizer import build_tokenizer
from sfi_core.generation.text_stream import TextStream


@pytest.mark.parametrize(
    "text", [" Belora hid a lantern.\n\nLater, more", "héllo 数字 ok", "a\nb\nc"]
)
def test_the_pieces_add_up_to_the_text(text):
    tokenizer = build_tokenizer(64)
    stream = TextStream(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(stream.push(token) for token in ids) == text


def test_a_character_split_over_tokens_waits_until_it_is_whole():
    tokenizer = build_tokenizer(64)
    ids = tokenizer("数", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert len(ids) > 1
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["数"]
