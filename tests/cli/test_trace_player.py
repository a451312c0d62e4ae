"""The player of `sfi trace replay --play`: screens as text, keys, and a terminal of its own.

Screens are compared as plain text: colors, ids and the glyphs of the footer change with Textual's releases.
"""

import asyncio
import os
import signal
import sys
import termios

import numpy as np
import pytest
from textual.widgets import Input

from sfi_cli.commands.trace.replay.player import BACKGROUND, FASTEST, PlayerApp, text_around
from sfi_core.errors import BackendError, TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.views.frames import playable
from sfi_traces.views.words import step_words
from tests.cli.screens import Terminal, screen
from tests.cli.trace_commands import raising
from tests.traces.made import make_trace
from tests.traces.small import fixed_trace, redact

trace = fixed_trace(policy="sfi")


def play(trace: Trace, check, size=(100, 24), **options) -> None:
    async def run() -> None:
        app = PlayerApp(playable(trace, **options))
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await check(app, pilot)

    asyncio.run(run())


def test_the_screen_of_a_step(trace):
    most = next(passage for passage in step_words(Request(trace), 12)["passages"] if passage["part"] == "selected")

    async def check(app, pilot):
        await pilot.press("space", "right", "s", "enter", "space")
        shown = screen(app)
        assert shown[0] == "step 12 of 59  fast, 2 since slow  sentence 1  reads 42 of 212 tokens"
        lines = [line[59:].strip() for line in shown[1:5]]
        assert lines[:2] == ["sink  0-3  mass 0.005", "the cat sat on"]
        assert lines[2].startswith(f"selected  {most['first']}-{most['last']}  in ")
        assert lines[2].endswith(f"%  mass {most['mass']:.3f}")
        assert most["text"].strip().startswith(lines[3])
        assert shown[19][:9] == "support  "
        assert shown[21].startswith("retained mass 0.805  overlap 0.917 with the last step")
        assert shown[22].endswith("4/s")

    play(trace, check)


def test_the_text_around_a_step_is_marked_by_why_the_step_reads_it(trace):
    request = playable(trace)
    text = text_around(request, 12, 10_000, 50)
    assert text.plain == "".join(request.words)
    marked: dict[str, str] = {}
    for span in text.spans:
        background = span.style.bgcolor and span.style.bgcolor.name
        marked[background] = marked.get(background, "") + text.plain[span.start : span.end]
    memory = request.memory
    selected = set(np.concatenate([*request.in_force(12).values()]).tolist())
    recent = range(memory.start_N[12], memory.length_N[12])
    for part, positions in (("sink", {*range(4)} - selected), ("selected", selected - {*recent}), ("recent", recent)):
        assert marked[BACKGROUND[part]] == "".join(request.words[at] for at in sorted(positions))
    assert [span.style.reverse for span in text.spans].count(True) == 1
    assert text_around(request, 12, 40, 50).plain in text.plain
    slow = text_around(request, 10, 10_000, 50)  # reads everything
    assert all(span.style.bgcolor is None for span in slow.spans)


@pytest.mark.exhaustive
def test_keys_move_through_the_run(trace):
    async def check(app, pilot):
        for keys, step in (
            (["s"], 10), (["s", "s"], 30), (["S"], 20), (["b"], 19), (["left", "backspace"], 17),
            (["end"], 59), (["space"], 59), (["s"], 59), (["home"], 0), (["b"], 0), (["S"], 0),
            (["g", *"42", "enter"], 42), (["g", *"999", "enter"], 59), (["g", "enter"], 59),
            (["g", *"7x", "enter"], 59), (["g", *"7", "escape"], 59),
        ):  # fmt: skip
            await pilot.press(*keys)
            assert app.step == step, keys
        assert not app.query_one(Input).display
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    play(trace, check)


def test_a_key_goes_to_the_next_step_that_differs_from_full_attention_and_it_says_how(trace):
    rows = trace.table("logits").to_pylist()
    differing = sorted(row["step"] for row in rows if not row["argmax_agrees"])

    async def check(app, pilot):
        for step in differing[:2]:
            await pilot.press("d")
            assert app.step == step
            (line,) = [line for line in screen(app) if "full attention" in line]
            probability = next(row["dense_probability"] for row in rows if row["step"] == step)
            assert line.startswith(f"full attention: ' river' ({probability:.0%})  retained mass")
        await pilot.press("D")
        assert app.step == differing[0]
        await pilot.press("b", "d", "space")
        assert not any("full attention" in line for line in screen(app)) or app.step in differing

    assert len(differing) > 2
    play(trace, check)


@pytest.mark.exhaustive
def test_it_plays_to_the_end_at_its_speed(trace):
    async def check(app, pilot):
        # far from the end, which a slow machine must not reach meanwhile
        await pilot.press("g", *"10", "enter", "plus", "plus", "minus", "a")
        assert app.speed == 8
        assert screen(app)[-2].endswith("playing 8/s")
        await pilot.press("a")
        step = app.step
        app.tick()
        assert app.step == step + 1
        await pilot.press("g", *"57", "enter")
        for _ in range(3):
            app.tick()
        assert app.step == 59
        await pilot.press(*["plus"] * 9)
        assert app.speed == FASTEST

    play(trace, check)


def test_traces_without_audit_or_text_play(tmp_path):
    async def check(app, pilot):
        await pilot.press("space")
        shown = screen(app)
        assert shown[0].startswith("step 1 of 11  fast")
        assert "0 1 2 3 4 5 6 7 8 9 10 11" in "\n".join(shown)
        assert "support  not audited" in shown
        assert " selected " in "\n".join(shown)

    folder = make_trace(tmp_path / "t", steps=12, policy="sfi", audit=None)
    redact(folder)
    play(Trace.open(folder), check)


def test_a_damaged_part_ends_it_with_the_error(tmp_path):
    folder = make_trace(tmp_path / "t", steps=12, policy="sfi")
    opened = playable(Trace.open(folder))
    (folder / "supports" / "part-00000.parquet").write_bytes(b"")
    app = PlayerApp(opened)

    async def run() -> None:
        async with app.run_test() as pilot:
            await pilot.pause()

    asyncio.run(run())
    assert isinstance(app.failure, TraceError)
    assert app.return_code == 3


def test_without_textual_a_line_says_how_to_install_it(monkeypatch, trace):
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(BackendError, match=r"textual, which is not installed; pip install -e '/.+\[player\]'"):
        raising("trace", "replay", trace.path, "--play")


@pytest.mark.exhaustive
def test_a_terminal_is_given_back(command, environment, trace):
    words = [*command, "trace", "replay", str(trace.path), "--play"]
    with Terminal(words, environment) as terminal:
        terminal.wait_for("step 0 of 59")
        assert termios.tcgetattr(terminal.slave) != terminal.before
        os.write(terminal.master, b"s")
        terminal.wait_for("trigger")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("\x1b[?1049l")  # back from the alternate screen
        assert terminal.process.wait(30) == 130
        assert termios.tcgetattr(terminal.slave) == terminal.before
