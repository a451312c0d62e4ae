"""What torchrun says of this process; without torch, so that the command line can ask at once."""

import os

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def size() -> int:
    """Return how many processes torchrun has started for one job; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in NAMES) else 1


def number() -> int:
    """Return which of them this is."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def local() -> int:
    """Return which of those on this machine it is: the number of its device."""
    return int(os.environ["LOCAL_RANK"]) if size() > 1 else 0


def neighbors() -> int:
    """Return how many of them share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if size() > 1 else 1


def first() -> bool:
    """Say whether this process speaks for all of them."""
    return number() == 0
