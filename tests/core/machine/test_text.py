"""Text that came from a file or a client."""

import json

import pytest

from sfi_core.machine.text import parse_json, printable_lines, shown, write_json

ODD = "\x1b[2J \x9b31m \u202eabc \x7f \ud800 \U000e0001"


def test_what_does_not_print_is_escaped_and_json_stays_the_same():
    assert printable_lines(f"one{ODD}\ntwo é") == ("one\\x1b[2J \\x9b31m \\u202eabc \\x7f \\ud800 \\U000e0001\ntwo é")
    text = write_json({"model": ODD, "é": ["\n"]}, indent=1)
    assert text.replace("\n", "").isprintable()
    assert '"é"' in text
    assert json.loads(text) == {"model": ODD, "é": ["\n"]}


@pytest.mark.parametrize(("text", "why"), [("[" * 100_000, "nested too deeply"), ("9" * 5000, "digits")])
def test_json_that_python_cannot_read_is_a_value_error(text, why):
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_a_value_in_an_error_is_short():
    nested = []
    for _ in range(5000):
        nested = [nested]
    assert shown("sfl") == "'sfl'"
    assert shown(10**5000) == "int too long to show"
    assert shown(nested) == "list too long to show"
    assert len(shown("x" * 10**6)) == 203
