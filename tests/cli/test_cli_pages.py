"""docs/cli: what `docs/make_cli_pages.py` makes of the parser and the settings."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STALE = "docs/cli is stale; run make docs-cli"


@pytest.fixture(scope="module")
def script():
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "make_cli_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_command_line_says(script):
    written = {path.name: path.read_text() for path in script.FOLDER.glob("*.md")}
    wanted = script.pages()
    stale = [name for name in wanted.keys() | written if wanted.get(name) != written.get(name)]
    assert not stale, STALE


def test_every_page_is_in_the_index(script):
    wanted = script.pages()
    assert all(f"]({name})" in wanted["README.md"] for name in wanted if name != "README.md")


def test_examples_in_a_row_are_one_block_of_code(script):
    text = "Do this.\n\nFor example:\n\n  sfi a\n\n  sfi b\n\nAnd that."
    assert script.prose(text) == ["Do this.", "For example:", "```\nsfi a\nsfi b\n```", "And that."]


def test_a_bar_does_not_end_a_cell_of_a_table(script):
    assert script.escaped("lambda* | <b>") == r"lambda\* \| \<b>"


def test_no_help_has_brackets_that_a_terminal_would_take_for_a_style(script):
    for name, text in script.pages().items():
        if name not in ("README.md", "settings.md"):
            assert not re.search(r"\[[a-z@#/][^\]]*\](?!\()", text), name
