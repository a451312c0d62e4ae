"""A step of `--play` as text: the generated text, strips of the context, what the audit measured."""

import io
import shutil
import sys
from typing import TYPE_CHECKING, Any

from sfi_traces.views.table import dense_words

if TYPE_CHECKING:  # numpy and Arrow take time
    from sfi_traces.model.request import Request
    from sfi_traces.views.frames import Frame

OTHER = "#7fb8ff"  # color of a token that full attention would not have said
BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
LABEL = 9  # columns before a strip
TEXT = 4  # lines of text


def plain_frame(request: "Request", step: int) -> str:
    """Return a step as plain text, brackets around the current sentence."""
    from rich.console import Console

    from sfi_traces.views import frames

    # without markup: a token may look like it
    plain: dict[str, Any] = dict.fromkeys(("markup", "emoji", "highlight"), False)
    written = io.StringIO()
    console = Console(file=written, width=shutil.get_terminal_size().columns, color_system=None, **plain)
    frame = frames.frame(request, step)
    rows = strips(request, step, console.width, shades(sys.stdout.encoding))
    text = _text(frame).wrap(console, console.width)[-TEXT:]
    for part in (head(request, frame), "", *text, "", *rows, measures(frame)):
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines()) + "\n"


def head(request: "Request", frame: "Frame") -> Any:
    """Return a line: the step's number, why it is slow or fast, and how much it reads."""
    from rich.text import Text

    row = frame.row
    kind = f"slow ({row['reason']})" if row["slow"] else f"fast, {row['steps_since_slow']} since slow"
    head = Text(f"step {row['step']} of {len(request.steps) - 1}  ", no_wrap=True, overflow="ellipsis")
    head.append(kind, style="bold red" if row["slow"] else "bold green")
    reads = f"reads {row['attended_tokens']:,.0f} of {row['context_tokens']:,} tokens"
    return head.append(f"  sentence {row['sentence']}  {reads}")


def _text(frame: "Frame") -> Any:
    from rich.text import Text

    text = Text(blanked(frame.before))
    return text.append(f"[{blanked(frame.sentence + frame.token)}]")


def blanked(text: str) -> str:
    """Replace control characters by blanks: a terminal would execute them."""
    odd = {ord(c): " " for c in set(text) if not c.isprintable() and c != "\n"}
    return text.translate(odd) if odd else text


def strips(request: "Request", step: int, width: int, shades: str) -> list[Any]:
    """Return three lines over the context: the support, its changes, and the memory."""
    from rich.text import Text

    from sfi_traces.views import frames

    strip = frames.strip(request, step, max(1, width - LABEL - 1))
    most = max(float(strip.mass.max()), 1e-9)
    levels = [round((value / most) ** 0.5 * (len(shades) - 1)) for value in strip.mass.tolist()]
    audited = frames.is_audited(request, step)
    support = "".join(shades[level] for level in levels) if audited else "not audited"
    changed = Text()
    for added, removed in zip(strip.added.tolist(), strip.removed.tolist(), strict=True):
        changed.append("+" if added else "-" if removed else " ", style="green" if added else "red")
    memory = "".join(
        "s" if sink else "r" if recent else "." if selected else " "
        for sink, recent, selected in zip(
            strip.sink.tolist(), strip.recent.tolist(), strip.selected.tolist(), strict=True
        )
    )
    rows = (("support", Text(support, style="cyan")), ("changed", changed), ("memory", Text(memory, style="yellow")))
    return [Text(f"{name:<{LABEL}}", no_wrap=True).append(row) for name, row in rows]


def shades(encoding: str | None) -> str:
    """Return the characters of a strip that an encoding has, from empty to full."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII
    return BLOCKS


def measures(frame: "Frame") -> Any:
    """Return the line of what the audit measured; empty for a step that was not audited."""
    from rich.text import Text

    named = (
        ("retained mass {:.3f}", frame.measures["retained_mass"]),
        ("overlap {:.3f} with the last step", frame.measures["overlap_previous_step"]),
        ("{:.3f} with the last slow step", frame.measures["overlap_last_refresh"]),
        ("lambda* {:.3f}", frame.lambda_star),
    )
    line = "  ".join(text.format(value) for text, value in named if value is not None)
    dense = "" if frame.dense is None else f"full attention: {dense_words(frame.dense)}  "
    return Text.assemble((dense, OTHER), line, no_wrap=True, overflow="ellipsis")
