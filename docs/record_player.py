"""Record `sfi trace replay DIR --play` as an animated SVG: a film strip of frames behind a window.

python docs/record_player.py run docs/player.svg --steps 10-20
"""

import argparse
import asyncio
import html
import re
from pathlib import Path
from xml.etree import ElementTree as ET

from sfi_cli.commands.trace.replay.player import PlayerApp
from sfi_traces import Trace
from sfi_traces.model.request import Request
from sfi_traces.views.frames import playable

WIDTH, HEIGHT = 110, 22  # columns and lines of a frame
CELL, LINE = 12.2, 24.4  # width of a column and height of a line in Textual's screenshots
LEFT, TOP, GAP = 14, 44, 10  # around the terminal's text
FAST, SLOW = 0.5, 2.5  # seconds that a step is shown
PAPER = "#121212"  # Textual's background, which the window has
SVG = "{http://www.w3.org/2000/svg}"
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
TITLE = "sfi trace replay run --play"


def main() -> None:
    """Write the SVG of the steps that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path, help="a trace with --audit 1")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", default="10-20", help="first and last step")
    arguments = parser.parse_args()
    first, last = map(int, arguments.steps.split("-"))
    run = playable(Trace.open(arguments.trace))
    film = record(run, range(first, min(last + 1, len(run.steps))))
    arguments.output.write_text(film, encoding="utf-8")
    print(f"Wrote {arguments.output} ({len(film.encode()) / 1000:.0f} kB)")


def record(run: Request, steps: range) -> str:
    """Draw the steps below each other, and let the window jump from one to the next."""
    frames, looks = [], {}
    for number, svg in enumerate(asyncio.run(screenshots(run, steps))):
        frames.append(_frame(svg, number * HEIGHT * LINE, looks))
    shown = [SLOW if step in run.steps.slow_at else FAST for step in steps]
    begins = [sum(shown[:number]) / sum(shown) for number in range(len(shown))]
    keys = " ".join(
        f"{begin:.2%} {{ transform: translateY({-number * HEIGHT * LINE:g}px) }}" for number, begin in enumerate(begins)
    )
    styles = "\n".join(f".{name} {{ {css} }}" for css, name in looks.items())
    wide, high = round(2 * LEFT + WIDTH * CELL), round(TOP + HEIGHT * LINE + GAP)
    return f"""\
<svg viewBox="0 0 {wide} {high}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{TITLE}</title>
<style>
text {{ font: 20px {FONTS}; white-space: pre }}
{styles}
.film {{ animation: {sum(shown):g}s step-end infinite play }}
@keyframes play {{ {keys} }}
@media (prefers-reduced-motion) {{ .film {{ animation: none }} }}
</style>
<rect width="{wide}" height="{high}" rx="10" fill="{PAPER}"/>
<circle cx="22" cy="22" r="6" fill="#ff5f57"/>
<circle cx="42" cy="22" r="6" fill="#febc2e"/>
<circle cx="62" cy="22" r="6" fill="#28c840"/>
<text x="50%" y="28" fill="#9aa0ac" text-anchor="middle">{TITLE}</text>
<svg x="{LEFT}" y="{TOP}" width="{WIDTH * CELL:g}" height="{HEIGHT * LINE:g}"><g class="film">
{"".join(frames)}
</g></svg>
</svg>
"""


async def screenshots(run: Request, steps: range) -> list[str]:
    """Return Textual's screenshot of each step."""
    app = PlayerApp(run, 1 / FAST)
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        found = []
        for step in steps:
            app.action_go(step)
            await pilot.pause()
            found.append(app.export_screenshot(simplify=True))
        return found


def _frame(svg: str, down: float, looks: dict[str, str]) -> str:
    # the rectangles and texts of a screenshot, with the names that the film has for their looks
    styles = dict(re.findall(r"\.(\S+) \{ ([^}]*) \}", svg))
    pieces = []
    for one in ET.fromstring(svg).iter():  # noqa: S314 - Textual's own
        kind = one.tag.removeprefix(SVG)
        if kind == "rect" and one.get("shape-rendering") and one.get("fill") != PAPER:
            place = f'x="{one.get("x")}" y="{float(one.get("y")) + down:g}"'
            size = f'width="{one.get("width")}" height="{one.get("height")}"'
            pieces.append(f'<rect {place} {size} fill="{one.get("fill")}"/>')
        elif kind == "text" and one.get("clip-path") and (one.text or "").strip("\u00a0"):
            name = looks.setdefault(styles[one.get("class")], f"r{len(looks)}")
            place = f'x="{one.get("x")}" y="{float(one.get("y")) + down:g}"'
            text = html.escape(one.text.rstrip("\u00a0"))
            pieces.append(f'<text class="{name}" {place}>{text}</text>')
    return "\n".join(pieces)


if __name__ == "__main__":
    main()
