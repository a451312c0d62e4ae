"""`sfi chat`: a document is read once, and each question goes on behind it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.settings import Given, TraceTable, given
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError, SfiError
from sfi_core.machine.files import read_file, write_atomically
from sfi_core.machine.text import parse_json, write_json
from sfi_core.settings.engine import EngineOptions, Sampling
from sfi_core.settings.policy_names import default_policy

if TYPE_CHECKING:
    from sfi_cli.commands.prompt_folder import PromptFolder

MESSAGES = "messages.json"  # of the conversation, beside the prompt
HISTORY = "chat_history"
MOST_LINES = 1000  # of the history
HELP = "/report  /policy NAME  /lossless  /trace DIR  /save FILE  /new  /quit\na line that ends in \\ goes on"


def chat(
    file: Annotated[o.File, typer.Option("--file", "-f", help="A document to talk about.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens of an answer.")] = 512,
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_device_budget: o.KvDeviceBudget = None,
    trust_remote_code: o.TrustRemoteCode = False,
    prompt_cache: o.PromptCache = None,
    policy: o.PolicyOrDefault = None,
    preset: o.Preset = None,
    config: o.Config = None,
    sets: Annotated[o.Words, o.sets()] = None,
    budget: o.Budget = None,
    recent: o.Recent = None,
    lossless: o.Lossless = False,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    seed: o.Seed = 0,
    trace: Annotated[o.File, o.option(o.TRACE, "Record the chat as a trace in this folder.")] = None,
    quiet: o.Quiet = False,
    force: o.Force = False,
) -> None:
    """Talk with a model, about a document that is read once.

    Each question is read behind the document and the answers before it, so
    that the next answer begins soon. Ctrl-C stops an answer, Ctrl-D ends the
    chat. Within: /report, /policy NAME, /lossless, /trace DIR, /save FILE,
    /new, /quit.

    For example:

      sfi chat --model smollm2

      sfi chat -f report.txt --model Qwen/Qwen3-0.6B --policy codescan

      sfi chat -f report.txt --model Qwen/Qwen3-0.6B --prompt-cache report
    """
    from sfi_cli.options import Subject
    from sfi_cli.parsing import read_text
    from sfi_cli.terminal.progress import Progress

    if model is None:
        raise ConfigError("--model must be one that chats, got the bundled one; for example --model smollm2")
    settings = given(
        "chat", preset=preset, file=config, sets=sets,
        options={
            "budget": budget, "recent": recent, "sampling.temperature": temperature, "sampling.top_p": top_p,
            "engine.kv_device_budget": kv_device_budget, "engine.lossless": lossless or None,
        },
    )  # fmt: skip
    document = "" if file is None else f"{read_text(file, 'document')}\n\n"
    output, subject = Output(quiet=quiet, force=force), Subject.of(settings, model, dtype, device, trust_remote_code)
    with Progress(quiet=quiet) as progress:
        progress.update(f"loading {subject.name}", 0, 0)
        from sfi_cli.commands.prompt_folder import PromptFolder

        folder = PromptFolder(prompt_cache, output.say)
        subject.check()
        loaded, tokenizer = subject.loaded()
    with history(), ExitStack() as traces:
        conversation = Chat(
            loaded, tokenizer, settings, document, folder, output, traces, policy=policy, limit=max_new_tokens,
            seed=seed, engine=settings.table(EngineOptions), preset=preset,
        )  # fmt: skip
        conversation.record(trace)
        conversation.begin()
        while (line := question()) is not None and line.strip() != "/quit":
            conversation.take(line)


@dataclass
class Chat:
    """A conversation: the messages so far, what the last answer's run left, and the trace of the answers."""

    model: Any
    tokenizer: Any
    settings: Given
    document: str
    folder: "PromptFolder"
    output: Output
    traces: ExitStack
    policy: str | None
    limit: int
    seed: int
    engine: EngineOptions
    preset: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    result: Any = None
    trace: Path | None = None
    observers: list[Any] = field(default_factory=list)

    def record(self, folder: Path | None) -> None:
        """End the trace, if there is one; record the answers from now on, each as a request, if a folder is given."""
        from sfi_cli.commands.generate.job import recording

        self.traces.close()
        self.trace, self.observers = None, []
        about = {"preset": self.preset, "seed": self.seed, "max_new_tokens": self.limit, "unit": "turn"}
        opened = recording(
            folder, self.settings.table(TraceTable), self.output, tokenizer=self.tokenizer, provenance=about
        )
        self.observers, _ = self.traces.enter_context(opened)
        self.trace = folder

    def begin(self) -> None:
        """Go on with the folder's conversation, if it is about this document, and read the document otherwise."""
        saved = read_messages(self.folder.path(MESSAGES), self.output.say)
        if saved and saved[0]["content"].startswith(self.document):
            self.messages = saved
            self.output.say(f"going on after {len(saved) // 2} answers; /new begins anew")
        elif self.document:
            # what the template makes of the document, whatever the question
            first, other = (self._ids([{"role": "user", "content": f"{self.document}{text}"}]) for text in "A1")
            shared = next(place for place, pair in enumerate(zip(first, other, strict=False)) if len(set(pair)) > 1)
            self._run(first[:shared], policy="full-kv", limit=1)
            self.folder.keep()
        self.output.say(HELP)

    def take(self, line: str) -> None:
        """Answer a question, or do what a line that begins with a slash says."""
        word, _, rest = line.strip().partition(" ")
        orders: dict[str, Callable[[str], None]] = {
            "/report": self._report, "/policy": self._choose, "/lossless": self._toggle, "/trace": self._trace,
            "/save": self._save, "/new": self._begin_anew,
        }  # fmt: skip
        try:
            if self.trace and word in ("/policy", "/lossless"):
                raise ConfigError(f"{word} must wait for the end of trace {self.trace}; /trace alone ends it")
            if word in orders:
                orders[word](rest.strip())
            elif word.startswith("/"):
                self.output.say(HELP)
            elif line.strip():
                self.answer(line)
        except KeyboardInterrupt:
            self.output.say("stopped")
        except (SfiError, OSError) as error:
            message(f"error: {error}")

    def answer(self, text: str) -> None:
        """Stream the answer to a question; one that is stopped before its first word is no part of the chat."""
        from sfi_core.models.rotation import most_positions

        messages = [*self.messages, {"role": "user", "content": text if self.messages else f"{self.document}{text}"}]
        ids = self._ids(messages)
        room = (most_positions(self.model.config) or sys.maxsize) - len(ids)
        if room < self.limit:
            self.output.say(f"the context has room for {max(0, room):,} more tokens; /new begins anew")
        self.result = self._run(ids, policy=self.policy, limit=max(1, min(self.limit, room)), stream=self.output)
        (request,), (words,) = self.result.report.requests, self.result.texts
        if not request.token_ids:
            raise self.result.error or KeyboardInterrupt
        self.messages = [*messages, {"role": "assistant", "content": words}]
        self.folder.keep()
        if (path := self.folder.path(MESSAGES)) is not None:
            write_atomically(path, write_json(self.messages).encode())
        known = f"{request.cached_prompt_tokens:,} of {request.prompt_tokens:,} tokens known"
        rate = self.result.report.steady_tokens_per_second
        speed = f"{rate:,.1f} tokens/s, cache read {request.cache_read_ratio:.1%}" if rate else "no step decoded"
        self.output.say(f"[first token after {request.prefill_seconds:.2f} s, {known}; {speed}]")
        if self.result.error is not None:
            raise self.result.error

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        from sfi_cli.commands.generate.prompts import token_ids

        return token_ids(messages, self.tokenizer, chat=True)

    def _run(self, ids: list[int], *, policy: str | None, limit: int, stream: Output | None = None) -> Any:
        from sfi_cli.commands.generate.job import decode

        policy = policy or default_policy(lossless=self.engine.lossless)
        engine = replace(self.engine, lossless=False) if policy == "full-kv" else self.engine
        return decode(
            self.model, self.tokenizer, [ids], self.settings.config, policy, engine, quiet=self.output.quiet,
            max_new_tokens=[limit], stream=stream, observers=self.observers if stream else (),
            cache=self.folder.cache, seed=self.seed, sampling=Sampling(**self.settings.of("sampling")),
        )  # fmt: skip

    def _report(self, _: str) -> None:
        if self.result is not None:
            self.output.say(str(self.result.report))

    def _choose(self, name: str) -> None:
        from sfi_core.policies import policy_class

        policy_class(name)
        self.policy = name

    def _toggle(self, _: str) -> None:
        self.engine = replace(self.engine, lossless=not self.engine.lossless)
        self.output.say(f"lossless {'on' if self.engine.lossless else 'off'}")

    def _trace(self, folder: str) -> None:
        if not folder and not self.trace:
            raise ConfigError("/trace must name a folder, got none")
        self.record(Path(folder).expanduser() if folder else None)

    def _save(self, file: str) -> None:
        if not file or not self.messages:
            raise ConfigError("/save must name a file and come after an answer")
        said = [row["content"] for row in self.messages]
        said[0] = said[0].removeprefix(self.document)
        said[::2] = [indent(question, "> ", lambda _: True) for question in said[::2]]
        with Output(Path(file).expanduser(), force=self.output.force, quiet=self.output.quiet) as written:
            written.text("\n\n".join(said) + "\n")

    def _begin_anew(self, _: str) -> None:
        self.messages = []


def question() -> str | None:
    """Read a question, of several lines where each but the last ends in a backslash; None at the input's end."""
    asks = sys.stdin.isatty()
    try:
        line = input("> " if asks else "")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input('. ' if asks else '')}"
    except (EOFError, KeyboardInterrupt) as ended:
        if asks:  # the cursor is still behind the prompt
            Output().stream("\n")
        elif isinstance(ended, KeyboardInterrupt):
            raise
        return None if isinstance(ended, EOFError) else ""
    return line


@contextmanager
def history() -> Iterator[None]:
    """Let the arrow keys bring earlier questions back, those of earlier chats too, and take pasted lines as one."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sfi"
    readline.set_history_length(MOST_LINES)
    readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted are one question
    with suppress(OSError):
        readline.read_history_file(folder / HISTORY)
    try:
        yield
    finally:
        if sys.stdin.isatty():
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                readline.write_history_file(folder / HISTORY)


def read_messages(path: Path | None, say: Callable[[str], None]) -> list[dict[str, str]]:
    """Read a conversation: questions and answers in turns; [] where there is none, a damaged one is said."""
    if path is None or not path.exists():
        return []
    try:
        saved = parse_json(read_file(path))
        texts = [(row["role"], row["content"]) for row in saved]
    except (OSError, ValueError, TypeError, KeyError):
        texts = [("", "")]
    roles = ["user", "assistant"] * (len(texts) // 2)
    if [role for role, _ in texts] != roles or not all(isinstance(text, str) for _, text in texts):
        say(f"{path} must be questions and answers in turns, got something else; a new conversation begins")
        return []
    return [{"role": role, "content": text} for role, text in texts]
