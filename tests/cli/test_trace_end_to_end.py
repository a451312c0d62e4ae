"""The bundled example recorded, and every other `sfi trace` command on what was recorded."""

import json
from pathlib import Path

import pytest

from tests.cli.trace_commands import trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "run"
    assert trace("record", "-o", folder, "--audit", "1", "--set", "audit.top=512", "-q").code == 0
    return folder


def test_show_has_every_section_and_the_papers_question(folder):
    """Within-sentence support stability, of the bundled checkpoint's own run."""
    ended = trace("show", folder, "--json")
    document = json.loads(ended.stdout)
    assert document["missing"] == []
    assert document["steps"]["reasons"] == {"trigger": 4, "first": 1}
    within, across = (document["stability"][where]["mean"] for where in ("within", "across"))
    assert within > across
    text = trace("show", folder, "--full").stdout
    assert "within a sentence" in text
    assert "across a boundary" in text
    assert f"{within:.3f}" in text
    assert trace("check", folder).stdout.endswith("\nsound\n")
