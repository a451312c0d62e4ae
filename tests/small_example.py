"""The bundled example with a shorter document: the same request and settings, less work."""

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sfi_core.bundled import example

SENTENCES = 220  # 2,350 tokens

PROMPT = "Later, Belora hid a red lantern under the old bridge.\nQuestion: What is written about Belora?\nAnswer:"


@contextmanager
def small_example():
    """Let commands and `load_example` have a document of three tenths of the length."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "FILE", Path(folder) / "example.json")
        patch.setattr(example, "SENTENCES", SENTENCES)
        example.main()
        yield
