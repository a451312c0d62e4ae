"""`sfi trace replay --play`: a recorded run in the terminal, one step at a time."""

import asyncio
import signal
from contextlib import suppress
from typing import Any

import numpy as np
from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.timer import Timer
from textual.widgets import Footer, Input, Static

from sfi_cli.terminal.output import INTERRUPTED
from sfi_cli.terminal.tables import shortened
from sfi_core.errors import SfiError
from sfi_traces.model.request import Request
from sfi_traces.views import frames
from sfi_traces.views.table import dense_words
from sfi_traces.views.words import Passage

SPEED, FASTEST = 4.0, 64.0  # steps a second
LONGEST = 240  # characters of a passage
LABEL = 9  # columns before a strip
SHADES = " ▁▂▃▄▅▆▇█"
SLOW = "#ff8a8a"  # color of a token of a slow step
OTHER = "#7fb8ff"  # and of one that full attention would not have said
BACKGROUND = {"sink": "#45306b", "selected": "#6b4f10", "recent": "#1d4d3c", "all": "#6b4f10"}
KEYS: list[BindingType] = [
    Binding("space,right,enter", "move(1)", "next", key_display="space"),
    Binding("left,b,backspace", "move(-1)", "back", key_display="b"),
    Binding("s", "next('slow_at', 1)", "slow step"),
    Binding("S", "next('slow_at', -1)", "slow step before", show=False),
    Binding("d", "next('disagreeing', 1)", "differs"),
    Binding("D", "next('disagreeing', -1)", "differing step before", show=False),
    Binding("g", "ask", "go to"),
    Binding("a", "play", "play"),
    Binding("plus,equals_sign", "faster(2)", "faster", key_display="+"),
    Binding("minus", "faster(0.5)", "slower", key_display="-"),
    Binding("home", "go(0)", "first step", show=False),
    Binding("end", "go(-1)", "last step", show=False),
    Binding("escape", "leave_field", "leave the field", show=False),
    Binding("q,ctrl+d", "quit", "quit", key_display="q"),
    Binding("ctrl+c", "interrupt", "interrupt", show=False, priority=True),
]


class PlayerApp(App[None]):
    """Shows a step: its text, the passages that it reads, where its attention lies; `failure` is what ended it."""

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (90, "-wide")]  # noqa: RUF012 - as Textual has them
    CSS = """
    #about, #measures, #state { height: 1; }
    #strips { height: 2; }
    #state { text-align: right; color: $text-muted; }
    #body { height: 1fr; }
    #text { width: 3fr; height: 1fr; overflow: hidden; }
    #sources { width: 2fr; height: 1fr; overflow: hidden; margin-left: 1; background: $surface; }
    .-narrow #sources { display: none; }
    #ask { display: none; height: 1; border: none; padding: 0; }
    """
    BINDINGS = KEYS

    def __init__(self, request: Request, speed: float = SPEED) -> None:
        """Show the first step of a run; it plays `speed` steps a second."""
        super().__init__()
        self.request, self.speed, self.step = request, speed, 0
        self.failure: SfiError | None = None
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static(id="about")
        with Horizontal(id="body"):
            yield Static(id="text")
            yield Static(id="sources")
        for name in ("strips", "measures", "state"):
            yield Static(id=name)
        yield Input(id="ask", placeholder="step: ", compact=True)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Let signals end the player as Ctrl-C does, so that the terminal is restored."""
        self.play(on=False)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            with suppress(NotImplementedError):  # on Windows
                loop.add_signal_handler(signal.SIGINT, self.action_interrupt)
                loop.add_signal_handler(signal.SIGTERM, self.action_interrupt)

    def on_resize(self, event: Resize) -> None:
        """Show the step anew after the screen's size has changed."""
        self.call_after_refresh(self.show_step)

    def show_step(self) -> None:
        """Show the step; end the player if a part of the trace cannot be read."""
        pane = self.query_one("#text", Static).size
        try:
            frame = frames.frame(self.request, self.step)
            shown = {
                "about": head(self.request, frame),
                "text": text_around(self.request, self.step, pane.width * max(1, pane.height // 2), pane.width),
                "sources": Text("\n").join(map(_passage, frames.passages(self.request, self.step, pane.height))),
                "strips": Text("\n").join(strips(self.request, self.step, self.size.width)),
                "measures": measures(frame),
            }
        except SfiError as error:
            self.failure = error
            self.exit(return_code=error.exit_code)
            return
        for name, text in shown.items():
            self.query_one(f"#{name}", Static).update(text)

    def play(self, *, on: bool) -> None:
        """Play at the speed, or stop; show which."""
        if self._timer:
            self._timer.stop()
        self._timer = self.set_interval(1 / self.speed, self.tick) if on else None
        self.query_one("#state", Static).update(f"{'playing ' * on}{self.speed:g}/s", layout=False)

    def action_go(self, step: int) -> None:
        """Show a step; -1 is the last one."""
        last = len(self.request.steps) - 1
        self.play(on=False)
        self.step = last if step < 0 else min(step, last)
        self.show_step()

    def action_move(self, steps: int) -> None:
        """Go forward by `steps`, or back."""
        self.action_go(max(0, self.step + steps))

    def action_next(self, kind: str, side: int) -> None:
        """Go to the next step of a kind, or to the previous one: slow, or unlike full attention's token."""
        steps = self.request.steps.slow_at if kind == "slow_at" else self.request.disagreeing
        beyond = [step for step in steps if (step > self.step if side > 0 else step < self.step)]
        if beyond:
            self.action_go(beyond[0] if side > 0 else beyond[-1])
        else:
            self.notify("no such step", severity="warning")

    def action_play(self) -> None:
        """Play, or stop."""
        self.play(on=self._timer is None)

    def action_faster(self, factor: float) -> None:
        """Play faster or slower."""
        self.speed = max(1 / FASTEST, min(FASTEST, self.speed * factor))
        self.play(on=self._timer is not None)

    def tick(self) -> None:
        """Show the next step; stop at the end."""
        if self.step >= len(self.request.steps) - 1:
            self.play(on=False)
            return
        self.step += 1
        self.show_step()

    def action_ask(self) -> None:
        """Open the field for a step's number."""
        self.play(on=False)
        field = self.query_one("#ask", Input)
        field.value, field.display = "", True
        field.focus()

    def action_leave_field(self) -> None:
        """Close the field."""
        self.query_one("#ask", Input).display = False
        self.set_focus(None)

    @on(Input.Submitted)
    def answered(self, event: Input.Submitted) -> None:
        """Go to the step."""
        self.action_leave_field()
        text = event.value.strip()
        if text.isascii() and text.isdecimal():
            self.action_go(int(text))
        elif text:
            self.notify(f"step must be a number, got {text}", severity="warning")

    def action_interrupt(self) -> None:
        """End the player with the exit code of Ctrl-C."""
        self.exit(return_code=INTERRUPTED)


def text_around(request: Request, step: int, room: int, width: int) -> Text:
    """Write the tokens around a step's, `room` characters each way; the background says why the step reads a token."""
    prompt, steps, memory = request.prompt_tokens, request.steps, request.memory
    redacted = request.rows["token_text"].null_count

    def word(at: int) -> str:
        return blanked(f" {at - prompt}" if redacted and at >= prompt else request.words[at])

    def within(places: range) -> list[int]:
        shown, spare = [], room
        for at in places:
            spare -= len(word(at)) + width * word(at).count("\n")
            if spare < 0:
                break
            shown.append(at)
        return shown

    current = prompt + step
    sentence = prompt + int(np.argmax(steps.sentence == steps.sentence[step]))
    read: dict[int, str] = {}
    if not memory.slow_N[step]:
        read |= dict.fromkeys(range(memory.sink), "sink")
        for positions in request.in_force(step).values():
            read |= dict.fromkeys(positions.tolist(), "selected")
        read |= dict.fromkeys(range(int(memory.start_N[step]), int(memory.length_N[step])), "recent")
    slow, other = set(steps.slow_at), set(request.disagreeing)
    slow = slow if len(slow) < len(steps) else set()
    shown = Text(overflow="fold")
    for at in (*within(range(current - 1, -1, -1))[::-1], current, *within(range(current + 1, prompt + len(steps)))):
        place = "bold reverse" if at == current else "dim" if at > current else "bold" if at >= sentence else ""
        color = OTHER if at - prompt in other else SLOW if at - prompt in slow else None
        background = BACKGROUND[read[at]] if at in read else None
        shown.append(word(at), Style.parse(place) + Style(color=color, bgcolor=background))
    return shown


def _passage(passage: Passage) -> Text:
    # its part, its positions, the share that is read, its mass and its text
    mass = "" if passage.mass is None else f"  mass {passage.mass:.3f}"
    share = "" if passage.part != "selected" else f"  in {passage.share:.0%}"
    part = Text(f" {passage.part} ", style=f"on {BACKGROUND[passage.part]}")
    shown = Text.assemble(part, f" {passage.first:,}-{passage.last:,}{share}{mass}")
    text = shortened(" ".join(blanked(passage.text).split()), LONGEST)
    return shown.append(f"\n{text}") if text else shown


def head(request: Request, frame: dict[str, Any]) -> Text:
    """Write a line: the step's number, why it is slow or fast, and how much it reads."""
    row = frame["row"]
    kind = f"slow ({row['reason']})" if row["slow"] else f"fast, {row['steps_since_slow']} since slow"
    line = Text(f"step {row['step']} of {len(request.steps) - 1}  ", no_wrap=True, overflow="ellipsis")
    line.append(kind, style="bold red" if row["slow"] else "bold green")
    reads = f"reads {row['attended_tokens']:,.0f} of {row['context_tokens']:,} tokens"
    return line.append(f"  sentence {row['sentence']}  {reads}")


def blanked(text: str) -> str:
    """Replace control characters by blanks: a terminal would execute them."""
    odd = {ord(c): " " for c in set(text) if not c.isprintable() and c != "\n"}
    return text.translate(odd) if odd else text


def strips(request: Request, step: int, width: int) -> list[Text]:
    """Draw two lines over the context: the support, and the memory."""
    strip = frames.strip(request, step, max(1, width - LABEL - 1))
    most = max(float(strip["mass"].max()), 1e-9)
    levels = [round((value / most) ** 0.5 * (len(SHADES) - 1)) for value in strip["mass"].tolist()]
    audited = request.support_rows.last(step) == step
    support = "".join(SHADES[level] for level in levels) if audited else "not audited"
    parts = zip(*(strip[name].tolist() for name in ("sink", "recent", "selected")), strict=True)
    memory = "".join("s" if sink else "r" if recent else "." if selected else " " for sink, recent, selected in parts)
    rows = (("support", Text(support, style="cyan")), ("memory", Text(memory, style="yellow")))
    return [Text(f"{name:<{LABEL}}", no_wrap=True).append(row) for name, row in rows]


def measures(frame: dict[str, Any]) -> Text:
    """Write the line of what the audit measured; empty for a step that was not audited."""
    named = {
        "retained_mass": "retained mass {:.3f}",
        "overlap_previous_step": "overlap {:.3f} with the last step",
        "overlap_last_refresh": "{:.3f} with the last slow step",
        "lambda_star": "lambda* {:.3f}",
    }
    values = frame["measures"]
    line = "  ".join(text.format(values[name]) for name, text in named.items() if values[name] is not None)
    dense = "" if frame["dense"] is None else f"full attention: {dense_words(frame['dense'])}  "
    return Text.assemble((dense, OTHER), line, no_wrap=True, overflow="ellipsis")
