"""Record `sfi trace replay DIR --play` as an animated SVG: a film strip of frames behind a window.

python docs/record_player.py run docs/player.svg --steps 10-26
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from sfi_cli.commands.trace.replay.frame_view import screen
from sfi_cli.commands.trace.replay.player import Player
from sfi_traces import Trace
from sfi_traces.replay.playback import Playback

WIDTH, HEIGHT = 100, 13  # columns and lines of a frame
LINE = 24.4  # height of a line in Rich's SVG
LEFT, TOP, GAP = 14, 44, 10  # around the terminal's text
FAST, SLOW = 0.5, 2.5  # seconds that a step is shown
CLIP = re.compile(r' clip-path="url\(#player-line-\d+\)"')  # one a line, which no line needs
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# Rich fills in what stands in single braces; no web font, so that the file loads nothing
FILM = """\
<svg viewBox="0 0 {width} HIGH" xmlns="http://www.w3.org/2000/svg" role="img">
<title>TITLE</title>
<style>
text {{ font: 20px FONTS; white-space: pre }}
{styles}
.film {{ animation: SECONDSs step-end infinite play }}
@keyframes play {{ KEYS }}
@media (prefers-reduced-motion) {{ .film {{ animation: none }} }}
</style>
<rect width="{width}" height="HIGH" rx="10" fill="#282a36"/>
<circle cx="22" cy="22" r="6" fill="#ff5f57"/>
<circle cx="42" cy="22" r="6" fill="#febc2e"/>
<circle cx="62" cy="22" r="6" fill="#28c840"/>
<text x="50%" y="28" fill="#9aa0ac" text-anchor="middle">TITLE</text>
<svg x="LEFT" y="TOP" width="{terminal_width}" height="WINDOW"><g class="film">
{backgrounds}
{matrix}
</g></svg>
</svg>
"""


def main() -> None:
    """Write the SVG of the steps that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path, help="a trace with --audit 1")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", default="10-26", help="first and last step")
    arguments = parser.parse_args()
    first, last = map(int, arguments.steps.split("-"))
    playback = Playback.load(Trace.open(arguments.trace))
    film = record(playback, range(first, min(last + 1, playback.steps)))
    arguments.output.write_text(film, encoding="utf-8")
    print(f"Wrote {arguments.output} ({len(film.encode()) / 1000:.0f} kB)")


def record(playback: Playback, steps: range) -> str:
    """Draw the steps below each other, and let the window jump from one to the next."""
    console = Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), record=True, width=WIDTH,
        height=HEIGHT + 1,  # a screen leaves one line free
        force_terminal=True, color_system="truecolor", legacy_windows=False,
    )  # fmt: skip
    player = Player(steps=playback.steps, slow_at=playback.slow_at, speed=1 / FAST, playing=True)
    for step in steps:
        player.step = step
        console.print(screen(playback, player, console))
    shown = [SLOW if step in playback.slow_at else FAST for step in steps]
    begins = [sum(shown[:number]) / sum(shown) for number in range(len(shown))]
    keys = [
        f"{begin:.2%} {{{{ transform: translateY({-number * HEIGHT * LINE:g}px) }}}}"
        for number, begin in enumerate(begins)
    ]
    film = FILM  # filled before the run's text comes in, which may have such words
    for name, value in {
        "HIGH": round(TOP + HEIGHT * LINE + GAP), "WINDOW": HEIGHT * LINE, "LEFT": LEFT, "TOP": TOP,
        "SECONDS": f"{sum(shown):g}", "KEYS": " ".join(keys), "FONTS": FONTS,
        "TITLE": "sfi trace replay run --play",
    }.items():  # fmt: skip
        film = film.replace(name, str(value))
    return CLIP.sub("", console.export_svg(code_format=film, unique_id="player"))


if __name__ == "__main__":
    main()
