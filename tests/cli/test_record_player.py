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


def test_every_frame_begins_where_the_window_jumps_to(script, film):
    jumps = [float(value) for value in re.findall(r"translateY\((-?[\d.]+)px\)", film)]
    heads = [float(text.get("y")) for text in texts(film) if text.text.startswith("step\u00a0")]
    assert len(heads) == 5
    assert [head - heads[0] for head in heads] == pytest.approx([-jump for jump in jumps])


def test_slow_steps_are_shown_longer(script, film):
    begins = [float(value) / 100 for value in re.findall(r"([\d.]+)% { transform", film)]
    seconds = float(re.search(r"animation: ([\d.]+)s", film)[1])
    shown = [(end - begin) * seconds for begin, end in zip(begins, [*begins[1:], 1], strict=True)]
    slow = [step for step, time in zip(range(8, 13), shown, strict=True) if time > 2]
    assert slow == [10]
    assert sum(shown) == pytest.approx(4 * script.FAST + script.SLOW)


def test_the_committed_film_loads_nothing_and_is_small():
    text = (DOCS / "player.svg").read_text(encoding="utf-8")
    assert texts(text)
    assert re.findall(r"https?://[^\"' )]+", text) == ["http://www.w3.org/2000/svg"]
    assert len(text) < 300_000
