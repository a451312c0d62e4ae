"""The grid of text windows."""

import pytest
import torch

from sfi_core.errors import ConfigError, InputError, NumericsError
from sfi_core.measure.evaluation import text_grid
from sfi_core.measure.evaluation.fidelity import Fidelity, fidelity, reference
from sfi_core.measure.evaluation.method import Method, Size
from sfi_core.measure.evaluation.text_grid import TextGrid, from_rows

TEXT = "Belora hid a red lantern under the old bridge. Tamvex stole a blue kettle near the mill. " * 8


def text_grid_of(*methods, **changes):
    values = {
        "methods": tuple(map(Method.parse, methods)), "sizes": (Size(share=0.3), Size(share=0.5)),
        "text": TEXT, "lengths": (40, 60), "tokens": 12, "count": 2,
    }  # fmt: skip
    return TextGrid(**values | changes)


def test_a_window_is_compared_as_on_its_own(loaded):
    grid = text_grid_of("full-kv", "sfi", "streaming-llm")
    grid.check(*loaded)
    rows = list(grid.run(*loaded))
    assert [grid.key(row) for row in rows] == grid.keys
    assert len(rows) == 2 * 2 * 2 * 2  # windows, lengths, methods but full attention, shares
    assert [grid.weight(key) for key in grid.keys[::4]] == [40, 60, 40, 60]
    for row, variant in zip(rows[:4], grid.variants, strict=True):
        window = grid.windows(loaded[1], 40)[0]
        full = reference(*loaded, [window])
        (own,) = fidelity(*loaded, full, variant.config(40), policy=variant.method.policy)
        assert from_rows([row]) == own
    joined = from_rows(rows[::4])
    assert joined == Fidelity.join(from_rows([row]) for row in rows[::4])


@pytest.mark.parametrize("policy", ["sfi", "freekv"])
def test_windows_that_are_decoded_together_are_those_of_one_by_one(loaded, policy):
    grid = text_grid_of(policy, lengths=(40,), count=3)
    alone = {grid.key(row): row for row in grid.run(*loaded)}
    together = {grid.key(row): row for row in grid.run(*loaded, batch_size=2)}
    assert together.keys() == alone.keys() == set(grid.keys)
    for key, row in alone.items():
        steps, others = row["steps"], together[key]["steps"]
        for name in ("kl", "nll", "nll_full"):
            assert others[name] == pytest.approx(steps[name], abs=1e-4)
        for name in ("step", "slow", "in_sentence", "window"):
            assert others[name] == steps[name]
        for name in ("read_ratio", "slow_at", "stored_ratio", "token_ids"):
            assert together[key]["report"][name] == row["report"][name]


def test_windows_that_fail_together_are_done_one_by_one(loaded, monkeypatch):
    """The reference of two windows does not fit for one length, a method's run for another."""
    grid = text_grid_of("sfi", "streaming-llm", sizes=(Size(share=0.3),))
    alone = {grid.key(row): row for row in grid.run(*loaded)}
    compare, read = text_grid.fidelity, text_grid.reference

    def scarce(model, tokenizer, full, config, *, policy, **options):
        if policy == "sfi" and len(full.windows) > 1:
            raise torch.OutOfMemoryError("no memory")
        return compare(model, tokenizer, full, config, policy=policy, **options)

    def small(model, tokenizer, windows, *given, **options):
        if windows[0].prompt_tokens == 60 and len(windows) > 1:
            raise torch.OutOfMemoryError("no memory")
        return read(model, tokenizer, windows, *given, **options)

    monkeypatch.setattr(text_grid, "fidelity", scarce)
    monkeypatch.setattr(text_grid, "reference", small)
    found = {grid.key(row): row for row in grid.run(*loaded, batch_size=2)}
    assert found.keys() == alone.keys()
    for key, row in found.items():
        assert row["error"] is None
        assert row["steps"]["kl"] == pytest.approx(alone[key]["steps"]["kl"], abs=1e-4)


def test_a_method_that_fails_on_a_window_does_not_stop_the_others(loaded, monkeypatch):
    compare = text_grid.fidelity

    def broken(*args, policy, **options):
        if policy == "quest":
            raise NumericsError("logits must be finite")
        return compare(*args, policy=policy, **options)

    monkeypatch.setattr(text_grid, "fidelity", broken)
    grid = text_grid_of("quest", "streaming-llm", lengths=(40,), count=1)
    rows = list(grid.run(*loaded))
    assert [row["error"] for row in rows] == ["logits must be finite"] * 2 + [None] * 2
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


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
        ({"sizes": (Size(share=0.1),)}, ConfigError, "share must leave a selected token"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_at_once(loaded, changes, error, message):
    methods = changes.pop("methods", ("sfi",))
    with pytest.raises(error, match=message):
        text_grid_of(*methods, **changes).check(*loaded)
