"""Parameters of tests: few cases of a cross product, with every value or every pair of values."""

from itertools import combinations, product

import pytest


def covering(*axes) -> list:
    """Return cases with every pair of values of two axes; the default run has every value in a case."""
    values = [list(axis) for axis in axes]
    rounds = _rounds(values)
    cases, paired = list(rounds), {pair for places in rounds for pair in _pairs(places)}
    every = list(product(*(range(len(axis)) for axis in values)))
    # cases that bring many new pairs come first, so that few are needed
    for wanted in range(len(axes) * (len(axes) - 1) // 2, 0, -1):
        for places in every:
            new = _pairs(places) - paired
            if len(new) >= wanted:
                cases.append(places)
                paired |= new
    return [case(*_taken(values, places), kept=places in rounds) for places in cases]


def each_value(*axes):
    """Return as many cases as the longest axis has values; every value of each axis is in one."""
    values = [list(axis) for axis in axes]
    return [_taken(values, places) for places in _rounds(values)]


def first(cases, number: int = 1) -> list:
    """Return cases of which the default run has the first `number`; a tuple is a case's values."""
    return [_marked(each, kept=place < number) for place, each in enumerate(cases)]


def case(*values, kept: bool = False):
    """Return a parameter set that the default run leaves out, unless it is kept."""
    return pytest.param(*values, marks=() if kept else pytest.mark.exhaustive)


def _marked(each, *, kept: bool):
    if isinstance(each, type(pytest.param())):
        return each if kept else pytest.param(*each.values, marks=(*each.marks, pytest.mark.exhaustive), id=each.id)
    return case(*(each if isinstance(each, tuple) else (each,)), kept=kept)


def _rounds(values: list[list]) -> list[tuple[int, ...]]:
    # From the third axis on, each round through an axis begins at another value: axes of one length would
    # otherwise pair the same values again and again.
    return [
        tuple((place + max(0, number - 1) * (place // len(axis))) % len(axis) for number, axis in enumerate(values))
        for place in range(max(map(len, values)))
    ]


def _pairs(places: tuple[int, ...]):
    return set(combinations(enumerate(places), 2))


def _taken(values: list[list], places: tuple[int, ...]) -> tuple:
    return tuple(axis[place] for axis, place in zip(values, places, strict=True))
