"""The grid of text windows."""

import pytest

from sfi_core.errors import ConfigError, InputError
from sfi_core.measure.evaluation.fidelity import Fidelity, WindowRows, fidelity, from_rows, reference, window_cells
from sfi_core.measure.evaluation.grid import Method, at_sizes, key_of

TEXT = "Belora hid a red lantern under the old bridge. Tamvex stole a blue kettle near the mill. " * 8


def grid_of(loaded, *methods, shares=(0.3, 0.5), lengths=(40, 60), text=TEXT, tokens=12, count=2):
    sized = at_sizes(list(map(Method.parse, methods)), shares=shares)
    cells = window_cells(sized, lengths, count, tokens)
    return cells, WindowRows(*loaded, text=text, tokens=tokens, count=count)


def test_a_window_is_compared_as_on_its_own(loaded):
    cells, windows_ = grid_of(loaded, "full-kv", "sfi", "streaming-llm")
    windows_.check(cells)
    rows = list(windows_.make(cells))
    assert list(map(key_of, rows)) == [cell.key for cell in cells]
    assert len(rows) == 2 * 2 * 2 * 2  # windows, lengths, methods but full attention, shares
    assert [cell.length for cell in cells[::4]] == [40, 60, 40, 60]
    for row, cell in zip(rows[:4], cells, strict=False):
        window = windows_.windows(40)[0]
        full = reference(*loaded, [window])
        (own,) = fidelity(*loaded, full, cell.method.config_for(40), policy=cell.method.policy)
        assert from_rows([row]) == own
    joined = from_rows(rows[::4])
    assert joined == Fidelity.join(from_rows([row]) for row in rows[::4])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"methods": ("full-kv",)}, ConfigError, "fidelity must have a method besides full-kv"),
        ({"tokens": 1}, ConfigError, "tokens must be at least 2, got 1"),
        ({"count": 0}, ConfigError, "windows must be at least 1, got 0"),
        ({"methods": ("a=sfi", "a=quest")}, ConfigError, "each method must differ, got a, a"),
        ({"lengths": (400,)}, InputError, "text must have at least"),
        ({"lengths": (1020,), "text": TEXT * 20}, InputError,
         "fidelity of length 1020 must fit the model's 1024 positions, got 1020 prompt and 12 new tokens"),
        ({"shares": (0.1,)}, ConfigError, "share must leave a selected token"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_at_once(loaded, changes, error, message):
    methods = changes.pop("methods", ("sfi",))

    def check():
        cells, rows = grid_of(loaded, *methods, **changes)
        rows.check(cells)

    with pytest.raises(error, match=message):
        check()
