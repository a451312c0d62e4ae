"""A command under torchrun: only the first of its processes writes to stdout and stderr."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from sfi_core.distributed import torchrun
from sfi_core.errors import ConfigError, RankLostError, SfiError

COMMANDS = (["generate"], ["trace", "record"])


def check_command(words: Sequence[str]) -> None:
    """Raise `ConfigError` for a command that several processes cannot share."""
    if torchrun.size() > 1 and not any(list(words[: len(names)]) == names for names in COMMANDS):
        known = " and ".join(f"sfi {' '.join(names)}" for names in COMMANDS)
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


def tells() -> bool:
    """Say whether this process prints an error: all processes may have met the same error."""
    if torchrun.size() == 1:
        return True
    from sfi_core.distributed.ranks import tells_errors

    return tells_errors()


def leave(error: SfiError) -> None:
    """End the process with the error's code; if a rank is lost, without closing the process group."""
    if isinstance(error, RankLostError):
        sys.stderr.flush()
        os._exit(error.exit_code)
    sys.exit(error.exit_code)
