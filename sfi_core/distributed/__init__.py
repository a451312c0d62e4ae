"""Several processes: torchrun's environment, without torch, so that the command line can ask at once; `ranks`."""

import os

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def size() -> int:
    """Return how many processes torchrun started for the job; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in NAMES) else 1


def number() -> int:
    """Return this process's rank."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def local() -> int:
    """Return this process's number on its machine, which is its device's too."""
    return int(os.environ["LOCAL_RANK"]) if size() > 1 else 0


def neighbors() -> int:
    """Return how many of the processes share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if size() > 1 else 1


def first() -> bool:
    """Say whether this process speaks for all."""
    return number() == 0
