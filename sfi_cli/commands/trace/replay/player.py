"""`sfi trace replay --play`: a recorded run in the terminal, one step at a time."""

import asyncio
import signal
from contextlib import suppress

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.timer import Timer
from textual.widgets import Footer, Input, OptionList, Select, Static

from sfi_cli.commands.trace.replay.frame_view import head, measures, shades, strips
from sfi_cli.commands.trace.replay.text_pane import TextLayout, TextPane, marks_at, passage_text, tokens_of
from sfi_cli.terminal.output import INTERRUPTED
from sfi_core.errors import SfiError
from sfi_traces.model.request import Request
from sfi_traces.views import frames
from sfi_traces.views.words import Passage

FASTEST = 64.0
EVERY = -1  # value of a picker: all layers, all heads
ASKED = {"go": "step", "search": "find"}
KEYS: list[BindingType] = [
    Binding("space,right,enter", "move(1)", "next", key_display="space"),
    Binding("left,b,backspace", "move(-1)", "back", key_display="b"),
    Binding("s", "next('slow_at', 1)", "slow step"),
    Binding("S", "next('slow_at', -1)", "slow step before", show=False),
    Binding("d", "next('disagreeing', 1)", "differs"),
    Binding("D", "next('disagreeing', -1)", "differing step before", show=False),
    Binding("g", "ask('go')", "go to"),
    Binding("slash", "ask('search')", "search", key_display="/"),
    Binding("n", "match(1)", "next"),
    Binding("N", "match(-1)", "match before", show=False),
    Binding("a", "play", "play"),
    Binding("plus,equals_sign", "faster(2)", "faster", key_display="+"),
    Binding("minus", "faster(0.5)", "slower", key_display="-"),
    Binding("l", "pick('layer', 1)", "layer"),
    Binding("L", "pick('layer', -1)", "layer before", show=False),
    Binding("h", "pick('head', 1)", "head"),
    Binding("H", "pick('head', -1)", "head before", show=False),
    Binding("home", "go(0)", "first step", show=False),
    Binding("end", "go(-1)", "last step", show=False),
    Binding("up", "scroll(-1)", "up", show=False),
    Binding("down", "scroll(1)", "down", show=False),
    Binding("pageup", "scroll(-10)", "page up", show=False),
    Binding("pagedown", "scroll(10)", "page down", show=False),
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
    VERTICAL_BREAKPOINTS = [(0, "-low"), (16, "-high")]  # noqa: RUF012
    CSS = """
    #about, #measures { height: 1; }
    #below { height: auto; }
    #strips { height: 3; }
    #pickers { height: 1; }
    #pickers Select { width: 20; }
    #state { width: 1fr; text-align: right; color: $text-muted; }
    #body { height: 1fr; }
    #text { width: 3fr; height: 1fr; overflow-x: hidden; overflow-y: scroll; }
    #sources { width: 2fr; height: 1fr; border: none; padding: 0; margin-left: 1; background: $surface; }
    .-narrow #body { layout: vertical; }
    .-narrow #text, .-narrow #sources { width: 100%; margin-left: 0; }
    .-low #sources, .-low #pickers { display: none; }
    #ask { display: none; height: 1; border: none; padding: 0; }
    """
    BINDINGS = KEYS

    def __init__(self, request: Request, speed: float, encoding: str | None = "utf-8") -> None:
        """Show the first step of a run; `encoding` is the terminal's."""
        super().__init__()
        self.request, self.speed, self._shades = request, speed, shades(encoding)
        self._places = request.places
        self.step = 0
        self.failure: SfiError | None = None
        self._timer: Timer | None = None
        self._asked = "search"
        self._words = ""
        self._shown: list[Passage] = []

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static(id="about")
        with Horizontal(id="body"):
            layout = TextLayout.of(tokens_of(self.request))
            yield TextPane(layout, marks_at(self.request, self.step), id="text")
            yield OptionList(id="sources")
        with Vertical(id="below"):
            yield Static(id="strips")
            yield Static(id="measures")
            with Horizontal(id="pickers"):
                for at, name in enumerate(("layer", "head")):
                    yield _picker(name, sorted({place[at] for place in self._places}))
                yield Static(id="state")
        yield Input(id="ask", compact=True)
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
        try:
            frame = frames.frame(self.request, self.step)
            marks = marks_at(self.request, self.step)
            self._shown = frames.passages(self.request, self.step)
            rows = strips(self.request, self.step, self.size.width, self._shades)
        except SfiError as error:
            self.failure = error
            self.exit(return_code=error.exit_code)
            return
        self.query_one("#about", Static).update(head(self.request, frame))
        self.query_one("#strips", Static).update(Text("\n").join(rows))
        self.query_one("#measures", Static).update(measures(frame))
        sources = self.query_one(OptionList)
        sources.clear_options()
        sources.add_options([passage_text(passage) for passage in self._shown])
        pane = self.query_one(TextPane)
        pane.mark(marks)
        pane.show_token(self.request.prompt_tokens + self.step)
        self.show_state()

    def show_state(self) -> None:
        """Show whether the run plays, the speed, and the words searched for."""
        playing = f"playing {self.speed:g}/s" if self._timer else f"{self.speed:g}/s"
        words = f"/{self._words}  " if self._words else ""
        self.query_one("#state", Static).update(f"{words}{playing}", layout=False)

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

    def action_scroll(self, lines: int) -> None:
        """Scroll the text."""
        self.query_one(TextPane).scroll_relative(y=lines, animate=False)

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

    def action_pick(self, name: str, side: int) -> None:
        """Choose the next layer or KV head, or the previous one; "all" is one of the choices."""
        at = 0 if name == "layer" else 1
        values = [EVERY, *sorted({place[at] for place in self._places})]
        self.query_one(f"#{name}", Select).value = values[(values.index(self._picked(name)) + side) % len(values)]

    def _picked(self, name: str) -> int:
        value = self.query_one(f"#{name}", Select).value
        return value if isinstance(value, int) else EVERY

    @on(Select.Changed)
    def picked(self) -> None:
        """Show the chosen layers and KV heads; warn if the trace has none such."""
        values = [self._picked(name) for name in ("layer", "head")]
        layers, heads = (None if value == EVERY else [value] for value in values)
        try:
            self.request.choose(layers, heads, self._places)
        except SfiError as error:
            self.notify(str(error), severity="warning")
            return
        self.set_focus(None)
        self.show_step()

    @on(TextPane.Clicked)
    def clicked(self, event: TextPane.Clicked) -> None:
        """Go to the step that generated the token; do nothing for a token of the prompt."""
        if event.token >= self.request.prompt_tokens:
            self.action_go(event.token - self.request.prompt_tokens)

    @on(OptionList.OptionSelected)
    def source_chosen(self, event: OptionList.OptionSelected) -> None:
        """Show a passage in the text."""
        passage = self._shown[event.option_index]
        pane = self.query_one(TextPane)
        pane.found = (int(pane.text.start_T[passage.first]), int(pane.text.start_T[passage.last + 1]))
        pane.show_token(passage.first)
        pane.refresh()
        self.set_focus(None)

    def action_ask(self, what: str) -> None:
        """Open the field for a step's number, or for words to find."""
        self._stop()
        self._asked = what
        field = self.query_one("#ask", Input)
        field.value, field.placeholder = "", f"{ASKED[what]}: "
        field.display = True
        field.focus()

    def action_leave_field(self) -> None:
        """Close the field, and end the search."""
        self.query_one("#ask", Input).display = False
        pane = self.query_one(TextPane)
        pane.found = None
        pane.refresh()
        self.set_focus(None)

    @on(Input.Submitted)
    def answered(self, event: Input.Submitted) -> None:
        """Go to the step, or to the first match."""
        event.input.display = False
        self.set_focus(None)
        text = event.value.strip() if self._asked == "go" else event.value
        if not text:
            return
        if self._asked == "search":
            self._words = text
            self.action_match(1)
        elif text.isascii() and text.isdecimal():
            self.action_go(int(text))
        else:
            self.notify(f"step must be a number, got {text}", severity="warning")

    def action_match(self, side: int) -> None:
        """Show the next match or the previous one, and its step if it was generated."""
        if not self._words:
            return
        pane = self.query_one(TextPane)
        first_token = self.request.prompt_tokens + self.step
        start = int(pane.text.start_T[first_token])
        if pane.found is not None:
            start = pane.found[0] + (1 if side > 0 else 0)
        pane.found = pane.text.find(self._words, start, backwards=side < 0)
        if pane.found is None:
            self.notify(f"no {self._words!r} in the text", severity="warning")
        else:
            token = pane.text.token_at(pane.found[0])
            if token >= self.request.prompt_tokens:
                self.action_go(token - self.request.prompt_tokens)
            pane.show_character(pane.found[0])
        pane.refresh()
        self.show_state()

    def action_interrupt(self) -> None:
        """End the player with the exit code of Ctrl-C."""
        self.exit(return_code=INTERRUPTED)


def _picker(name: str, values: list[int]) -> Select[int]:
    every = [(f"all {name}s", EVERY)]
    options = [*every, *((f"{name} {value}", value) for value in values)]
    return Select(options, id=name, value=EVERY, allow_blank=False, compact=True, type_to_search=False)
