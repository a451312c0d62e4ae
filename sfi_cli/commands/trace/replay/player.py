"""`sfi trace replay --play`: a recorded run in the terminal, one step at a time."""

import asyncio
import signal
from contextlib import suppress

from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.timer import Timer
from textual.widgets import Footer, Input, Static

from sfi_cli.commands.trace.replay.frame_view import OTHER, blanked, head, measures, shades, strips
from sfi_cli.terminal.output import INTERRUPTED
from sfi_core.errors import SfiError
from sfi_traces.model.request import Request
from sfi_traces.views import frames
from sfi_traces.views.words import Passage

FASTEST = 64.0
LONGEST = 240  # characters of a passage
SLOW = "#ff8a8a"  # color of a token of a slow step
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
    """Shows a step: its text, the passages that it reads, where its attention lies.

    It plays `speed` steps a second; `failure` is the error that ended it.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (90, "-wide")]  # noqa: RUF012 - as Textual has them
    CSS = """
    #about, #measures, #state { height: 1; }
    #strips { height: 3; }
    #state { text-align: right; color: $text-muted; }
    #body { height: 1fr; }
    #text { width: 3fr; height: 1fr; overflow: hidden; }
    #sources { width: 2fr; height: 1fr; overflow: hidden; margin-left: 1; background: $surface; }
    .-narrow #sources { display: none; }
    #ask { display: none; height: 1; border: none; padding: 0; }
    """
    BINDINGS = KEYS

    def __init__(self, request: Request, speed: float, encoding: str | None = "utf-8") -> None:
        """Show the first step of a run; `encoding` is the terminal's."""
        super().__init__()
        self.request, self.speed, self._shades = request, speed, shades(encoding)
        self.step = 0
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
                "strips": Text("\n").join(strips(self.request, self.step, self.size.width, self._shades)),
                "measures": measures(frame),
            }
        except SfiError as error:
            self.failure = error
            self.exit(return_code=error.exit_code)
            return
        for name, text in shown.items():
            self.query_one(f"#{name}", Static).update(text)
        self.show_state()

    def show_state(self) -> None:
        """Show whether the run plays, and the speed."""
        playing = f"playing {self.speed:g}/s" if self._timer else f"{self.speed:g}/s"
        self.query_one("#state", Static).update(playing, layout=False)

    def action_go(self, step: int) -> None:
        """Show a step; -1 is the last one."""
        last = len(self.request.steps) - 1
        self._stop()
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
        if self._timer:
            self._stop()
        else:
            self._timer = self.set_interval(1 / self.speed, self.tick)
        self.show_state()

    def action_faster(self, factor: float) -> None:
        """Play faster or slower."""
        self.speed = max(1 / FASTEST, min(FASTEST, self.speed * factor))
        if self._timer:
            self._stop()
            self._timer = self.set_interval(1 / self.speed, self.tick)
        self.show_state()

    def tick(self) -> None:
        """Show the next step; stop at the end."""
        if self.step >= len(self.request.steps) - 1:
            self._stop()
            self.show_state()
            return
        self.step += 1
        self.show_step()

    def _stop(self) -> None:
        if self._timer:
            self._timer.stop()
            self._timer = None

    def action_ask(self) -> None:
        """Open the field for a step's number."""
        self._stop()
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
    """Write the tokens before and after a step's, `room` characters each way, where a line break takes `width`.

    The background says why the step reads a token; a slow step reads all, so none is marked.
    """
    prompt, steps, memory = request.prompt_tokens, request.steps, request.memory
    redacted = request.rows["token_text"].null_count

    def word(at: int) -> str:
        return blanked(f" {at - prompt}" if redacted and at >= prompt else request.words[at])

    def within(places: range) -> list[int]:
        found, left = [], room
        for at in places:
            left -= len(word(at)) + width * word(at).count("\n")
            if left < 0:
                break
            found.append(at)
        return found

    current = prompt + step
    sentence = prompt + frames.sentence_begin(request, step)
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
    text = " ".join(blanked(passage.text).split())
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return shown.append(f"\n{text}") if text else shown
