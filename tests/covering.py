"""Parameters of tests: the whole cross product for `make test-all`, and what covers it for `make test`."""

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def covering(*axes: Collection[Any]) -> list[Any]:
    """Return the cross product of parameters; the default run has every value of each in a case.

    From the third axis on, each round through an axis begins at another value: axes of one length would
    otherwise pair the same values again and again.
    """
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    kept = {
        tuple(
            (place + max(0, number - 1) * (place // len(axis))) % len(axis)
            for number, axis in enumerate(values)
        )
        for place in range(longest)
    }
    return [
        case(
            *(axis[place] for axis, place in zip(values, places, strict=True)), kept=places in kept
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]


def case(*values: Any, kept: bool = False) -> Any:
    """Return a parameter set that the default run leaves out, unless it is kept."""
    return pytest.param(*values, marks=() if kept else pytest.mark.exhaustive)
