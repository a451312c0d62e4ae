"""The player as an animated SVG, for the documentation."""

import re
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from sfi_traces import Trace
from sfi_traces.replay.playback import Playback
from tests.traces.made import make_trace

DOCS = Path(__file__).parent.parent.parent / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(f"{SVG}text"))  # noqa: S314 - our own file


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**run_path(str(DOCS / "record_player.py")))


@pytest.fixture(scope="module")
def film(script, tmp_path_factory) -> str:
    folder = make_trace(tmp_path_factory.mktemp("film") / "run", steps=20, policy="sfi")
    return script.record(Playback.load(Trace.open(folder)), range(8, 13))


def test_the_committed_film_loads_nothing_and_is_small():
    text = (DOCS / "player.svg").read_text(encoding="utf-8")
    assert texts(text)
    assert re.findall(r"https?://[^\"' )]+", text) == ["http://www.w3.org/2000/svg"]
    assert len(text) < 300_000
