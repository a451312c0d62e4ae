"""How a step of `--play` looks: the text, where the support lies, what the step kept."""

import shutil
import sys
from typing import Any

from sfi_cli.terminal.tables import plain_console, printed

BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
LABEL = 9  # columns before a strip
FIXED = 9  # lines of a screen that are not text
LEAST_TEXT, PLAIN_TEXT = 3, 4
HELP = "space next  b back  n/p slow step  g go to  a play {speed:g}/s  +/- speed  q quit"


def screen(playback: Any, player: Any, console: Any) -> Any:
    """Return the player's screen."""
    from rich.console import Group
    from rich.text import Text

    frame = playback.frame(player.step)
    text = max(LEAST_TEXT, console.height - FIXED)
    lines = _lines(playback, frame, console, text, _shades(console.encoding), styled=True)
    keys = HELP.format(speed=player.speed) if player.typed is None else f"step: {player.typed}_"
    return Group(*lines, Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))


def plain_frame(playback: Any, step: int) -> str:
    """Return a step as plain text."""
    console = plain_console(shutil.get_terminal_size().columns)
    frame = playback.frame(step)
    shades = _shades(sys.stdout.encoding)
    lines = _lines(playback, frame, console, PLAIN_TEXT, shades, styled=False)
    return printed(console, lines) + "\n"


def _lines(
    playback: Any, frame: Any, console: Any, text_lines: int, shades: str, *, styled: bool
) -> list[Any]:
    from rich.text import Text

    width = max(1, console.width - LABEL - 1)
    body = _text(frame, styled=styled).wrap(console, console.width)[-text_lines:]
    body = [*body, *[Text("")] * (text_lines - len(body) if styled else 0)]
    return [
        _head(playback, frame),
        Text(""),
        *body,
        Text(""),
        *_strips(playback, frame, width, shades),
        Text(_measures(frame), no_wrap=True, overflow="ellipsis"),
    ]


def _head(playback: Any, frame: Any) -> Any:
    from rich.text import Text

    kind = f"slow ({frame.reason})" if frame.slow else f"fast, {frame.steps_since_slow} since slow"
    head = Text(f"step {frame.step} of {playback.steps - 1}  ", no_wrap=True, overflow="ellipsis")
    head.append(kind, style="bold red" if frame.slow else "bold green")
    return head.append(
        f"  sentence {frame.sentence_index}"
        f"  reads {frame.attended_tokens:,.0f} of {frame.context_tokens:,} tokens"
    )


def _text(frame: Any, *, styled: bool) -> Any:
    # in plain text brackets stand for the highlight
    from rich.text import Text

    text = Text(_printable(frame.before), style="dim" if styled else "")
    if not styled:
        return text.append(f"[{_printable(frame.sentence + frame.token)}]")
    text.append(_printable(frame.sentence), style="not dim bold")
    return text.append(_printable(frame.token), style="not dim bold reverse")


def _printable(text: str) -> str:
    # a terminal would obey control characters in the text of a model
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def _strips(playback: Any, frame: Any, width: int, shades: str) -> list[Any]:
    from rich.text import Text

    strip = playback.strip(frame.step, width)
    most = max(float(strip.mass.max()), 1e-9)
    levels = [round((value / most) ** 0.5 * (len(shades) - 1)) for value in strip.mass.tolist()]
    support = "".join(shades[level] for level in levels) if frame.audited else "not audited"
    changed = Text()
    for added, removed in zip(strip.added.tolist(), strip.removed.tolist(), strict=True):
        changed.append("+" if added else "-" if removed else " ", style="green" if added else "red")
    memory = "".join(
        "s" if sink else "r" if recent else "." if selected else " "
        for sink, recent, selected in zip(
            strip.sink.tolist(), strip.recent.tolist(), strip.selected.tolist(), strict=True
        )
    )
    rows = (
        ("support", Text(support, style="cyan")),
        ("changed", changed),
        ("memory", Text(memory, style="yellow")),
    )
    return [Text(f"{name:<{LABEL}}", no_wrap=True).append(row) for name, row in rows]


def _shades(encoding: str | None) -> str:
    try:
        BLOCKS.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII
    return BLOCKS


def _measures(frame: Any) -> str:
    named = (
        ("retained mass {:.3f}", frame.measures["retained_mass"]),
        ("overlap {:.3f} with the last step", frame.measures["overlap_previous_step"]),
        ("{:.3f} with the last slow step", frame.measures["overlap_last_refresh"]),
        ("lambda* {:.3f}", frame.lambda_star),
    )
    return "  ".join(text.format(value) for text, value in named if value is not None)
