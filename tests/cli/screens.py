"""The screen of a Textual app as text: from its screenshot, whose colors and ids every release changes."""

import re
from xml.etree import ElementTree as ET

from textual.app import App

CELL = 12.2  # width of a column in Rich's SVG


def screen(app: App) -> list[str]:
    """Return the lines of the screen, without blanks at their ends."""
    svg = ET.fromstring(app.export_screenshot(simplify=True))  # noqa: S314 - our own
    width, height = app.size
    cells = [[" "] * width for _ in range(height)]
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        clip = re.search(r"-line-(\d+)\)", text.get("clip-path", ""))
        if clip is None:
            continue  # the title
        column = round(float(text.get("x")) / CELL)
        for at, character in enumerate(text.text or "", column):
            if at < width:
                cells[int(clip[1])][at] = character.replace("\u00a0", " ")
    return ["".join(row).rstrip() for row in cells]
