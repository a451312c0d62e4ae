"""The `sfi` command line: assembles the commands and turns errors into exit codes.

Under torchrun only the first of a command's processes writes to stdout and stderr.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sfi_cli.commands import config, trace
from sfi_cli.commands.bench.command import bench
from sfi_cli.commands.chat import chat
from sfi_cli.commands.doctor import doctor
from sfi_cli.commands.evaluate.command import evaluate, lm_eval
from sfi_cli.commands.generate import generate
from sfi_cli.commands.kernel_bench import kernel_bench
from sfi_cli.commands.serve import Serve, serve
from sfi_cli.commands.tune import tune
from sfi_cli.commands.tune_heads import heads
from sfi_cli.terminal.output import Output, escape_unknown_characters, leave_interrupted, message
from sfi_core import distributed as torchrun
from sfi_core.errors import ConfigError, InputError, RankLostError, SfiError

OF_NO_FILE = (UnicodeEncodeError, ImportError, NameError, MemoryError)  # errors that no damaged file explains
_interrupted = Event()  # Ctrl-C was pressed
# the options of settings that errors of the core advise to change
OPTIONS = {"kv_device_budget": "--kv-device-budget", "contexts": "--context", "batches": "--batch"}
LONGEST = 255  # bytes of a file's name
HELP = "Slow-Fast Inference: decode long contexts and see what the model reads."
SHARED = (["generate"], ["trace", "record"])
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


class Group(TyperGroup):
    """Finds `sfi tune heads` before `sfi tune`, and says that a command was interrupted: Typer would not."""

    def make_context(self, *words: Any, **more: Any) -> Any:
        """Read the arguments; Ctrl-C meanwhile is one line."""
        try:
            return super().make_context(*words, **more)
        except KeyboardInterrupt:
            leave_interrupted()

    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C that it leaves to us is one line, also where an import made an error of it."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, ImportError) as error:
            if isinstance(error, ImportError) and not _interrupted.is_set():
                raise
            leave_interrupted()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command's name, the command, and the words after the name."""
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Leave out names of two words: a shell would insert such a name as a single word."""
        return [item for item in super().shell_complete(ctx, incomplete) if " " not in item.value]


app = typer.Typer(
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command(cls=Serve)(serve)
app.command("eval")(evaluate)
app.command("lm-eval", context_settings=PASSED_ON)(lm_eval)
app.command()(bench)
app.command()(kernel_bench)
app.add_typer(trace.app, name="trace")
app.command()(tune)
app.command("tune heads")(heads)
app.add_typer(config.app, name="config")
app.command()(doctor)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[  # noqa: ARG001 - `main` takes it out of the arguments
        bool, typer.Option("--debug", help="Show the traceback of an error; stands anywhere.")
    ] = False,
) -> None:
    """Slow-Fast Inference: decode long contexts and see what the model reads."""
    if version:
        from sfi_core import __version__

        Output().stream(f"sfi {__version__}\n")
        raise typer.Exit


def main() -> None:
    """Run the app: a user's mistake prints one line, a bug its traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _interrupt)
    escape_unknown_characters()
    debug = "--debug" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--debug"]
    try:
        check_command(sys.argv[1:])
        with one_voice():
            try:
                app()
            except SystemExit:
                Output().stream("")  # what help and the version left in the buffer
                raise
    except BrokenPipeError:
        sys.exit(1)  # the program that reads our pipe has ended
    except Exception as error:
        known = _in_one_line(error)
        if debug or known is None:
            raise
        # all processes may have met the same error
        if torchrun.size() == 1 or import_module("sfi_core.distributed.ranks").tells_errors():
            message(f"error: {in_options(str(known))}")
        if isinstance(known, RankLostError):  # closing the process group would wait
            sys.stderr.flush()
            os._exit(known.exit_code)
        sys.exit(known.exit_code)


def in_options(text: str) -> str:
    """Spell the settings that an error advises to change, behind its semicolon, as the command line's options."""
    rule, semicolon, advice = text.partition("; ")
    names = "|".join(OPTIONS)
    return rule + semicolon + re.sub(rf"(?<![\w.])({names})(?!\w)", lambda name: OPTIONS[name[0]], advice)


def _interrupt(number: int, frame: Any) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)


def _in_one_line(error: Exception) -> SfiError | None:
    # None for a bug, which keeps its traceback
    if isinstance(error, SfiError):
        return error
    if isinstance(error, OSError):
        return SfiError(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}")
    read = [word for word in sys.argv[2:] if sys.argv[1] in ("trace", "tune") and Path(word[:LONGEST]).exists()]
    if not read or isinstance(error, OF_NO_FILE):
        return None
    # what these commands read may be a stranger's
    return InputError(f"{read[0]} is damaged, or sfi is: {type(error).__name__}, {error}; --debug shows where")


def check_command(words: Sequence[str]) -> None:
    """Raise `ConfigError` for a command that several processes cannot share."""
    if torchrun.size() > 1 and not any(list(words[: len(names)]) == names for names in SHARED):
        known = " and ".join(f"sfi {' '.join(names)}" for names in SHARED)
        raise ConfigError(f"under torchrun the command must be {known}, got sfi {' '.join(words[:2])}")


@contextmanager
def one_voice() -> Iterator[None]:
    """Redirect stdout and stderr of all processes but the first to nowhere."""
    if torchrun.size() > 1:  # before PyTorch is imported: its warnings would come from each rank
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with ExitStack() as stack:
        if not torchrun.first():
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
