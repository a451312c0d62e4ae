"""Several processes of one command, under torchrun: the first one speaks."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from sfi_core.distributed import torchrun
from sfi_core.errors import ConfigError, RankLostError, SfiError

COMMANDS = (["generate"], ["trace", "record"])


def check_command(words: Sequence[str]) -> None:
    """Refuse a command that several processes cannot share.

    Raises:
        ConfigError: The command is none that several processes can share; the message names those.
    """
    if torchrun.size() > 1 and not any(list(words[: len(names)]) == names for names in COMMANDS):
        known = " and ".join(f"sfi {' '.join(names)}" for names in COMMANDS)
        raise ConfigError(
            f"under torchrun the command must be {known}, got sfi {' '.join(words[:2])}"
        )


@contextmanager
def one_voice() -> Iterator[None]:
    """Keep all processes but the first from writing to stdout and stderr inside."""
    if torchrun.size() > 1:  # set before PyTorch is imported: each rank would print its remarks
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with ExitStack() as stack:
        if not torchrun.first():
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def tells() -> bool:
    """Say whether this process prints an error; all processes may have met the same one."""
    if torchrun.size() == 1:
        return True
    from sfi_core.distributed.ranks import tells_errors

    return tells_errors()


def leave(error: SfiError) -> None:
    """End the process; without closing the process group where another process is lost."""
    if isinstance(error, RankLostError):
        sys.stderr.flush()
        os._exit(error.exit_code)
    sys.exit(error.exit_code)
