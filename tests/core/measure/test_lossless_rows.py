"""Lossless methods of an evaluation: their rows, their sums, and the check against full attention."""

from dataclasses import replace

import pytest

from sfi_core import EngineOptions, SfiConfig
from sfi_core.errors import ConfigError, NumericsError
from sfi_core.measure.evaluation.grid import key_of
from sfi_core.measure.evaluation.lossless_rows import check_exact, differences, drafting
from sfi_core.measure.evaluation.method import Method, at_sizes
from sfi_core.measure.evaluation.samples import SampleRows, sample_cells
from sfi_core.measure.evaluation.windows import window_cells
from tests.architectures import BY_LABEL

LOSSLESS = "exact=sfi:lossless=true,draft.max_tokens=4"


def cells_of(*methods):
    sized = at_sizes(list(map(Method.parse, methods)), budgets=[24], recent=16)
    return sample_cells(sized, ["bundled-recall-1"], [160], [0, 1])


def test_lossless_is_a_setting_of_a_method_and_none_of_its_policy():
    method = Method.parse("sfi@paper:lossless=true,draft.max_tokens=8")
    assert method.lossless
    assert method.config == SfiConfig.preset("paper").replace(draft={"max_tokens": 8})
    assert method.settings == {"lossless": True, "draft": {"max_tokens": 8}}
    asked = EngineOptions(kv_device_budget="20%")
    assert method.engine(asked) == EngineOptions(lossless=True)
    assert Method.parse("sfi:lossless=false").engine(asked) == asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("freekv:lossless=true", "method freekv:lossless=true: policy freekv cannot draft"),
        ("full-kv:lossless=true", "policy full-kv cannot draft"),
        ("sfi:lossless=1", "lossless must be true or false, got 1"),
    ],
)
def test_a_method_that_cannot_be_lossless_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Method.parse(text)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rows_have_full_attention_s_tokens_and_counts_that_add_up(loaded, batch_size):
    cells, samples = cells_of("full-kv", "sfi", LOSSLESS), SampleRows(*loaded)
    samples.check(cells)
    rows = {key_of(row): row for row in samples.make(cells, batch_size=batch_size)}
    assert rows.keys() == {cell.key for cell in cells}
    assert differences(rows.values()) == []
    for seed in (0, 1):
        full, plain, exact = (
            rows[name, size, "bundled-recall-1", 160, seed]
            for name, size in (("full-kv", "all"), ("sfi", "K 24"), ("exact", "K 24"))
        )
        assert exact["token_ids"] == full["token_ids"]
        assert exact["token_ids"] != plain["token_ids"]
        assert exact["score"] == full["score"]
        assert exact["accepted"] + exact["verifications"] == exact["generated"] - 1
        assert (plain["verifications"], full["drafted"]) == (None, None)


def test_where_windows_slide_a_batch_decodes_its_lossless_samples_one_by_one(tiny_tokenizer):
    made = BY_LABEL["gemma-2"]
    sizes = {"vocab_size": len(tiny_tokenizer), "max_position_embeddings": 1024}
    model = replace(made, settings={**made.settings, **sizes}).build()
    cells, samples = cells_of("full-kv", LOSSLESS), SampleRows(model, tiny_tokenizer)
    samples.check(cells)
    rows = list(samples.make(cells, batch_size=2))
    assert set(map(key_of, rows)) == {cell.key for cell in cells}
    assert [row["error"] for row in rows] == [None] * 4
    assert differences(rows) == []


def row(method="full-kv", tokens=(1, 2, 3), seed=0, **counts):
    lossless = method != "full-kv"
    return {
        "method": method, "policy": "sfi" if lossless else method, "size": "10%", "task": "recall",
        "length": 64, "seed": seed, "settings": {"lossless": True} if lossless else {},
        "token_ids": list(tokens), "generated": len(tokens), **counts,
    }  # fmt: skip


def test_the_first_other_token_is_named_in_float32_and_counted_below_it():
    rows = [row(), row("exact", (1, 2, 4)), row(seed=1), row("exact", (1, 2), 1)]
    rows.append(row("exact", (9,), 2))
    assert [(one["seed"], index) for one, index in differences(rows)] == [(0, 2), (1, 2)]
    with pytest.raises(NumericsError) as caught:
        check_exact(rows, "float32")
    assert str(caught.value) == (
        "lossless method exact at 10% must give full-kv's tokens in float32, got another at index 2 of "
        "task recall, length 64, seed 0; 2 samples in all"
    )
    check_exact(rows, "bfloat16")
    check_exact(rows[:1] + rows[4:], "float32")  # nothing to compare with


def test_the_sums_of_a_method_are_over_all_its_samples():
    rows = [
        row("exact", range(11), verifications=2, drafted=9, accepted=8),
        row("exact", range(6), 1, verifications=3, drafted=2, accepted=2),
    ]
    full = [row(tokens=range(11)), row(tokens=(0, 1, 2, 3, 4, 6), seed=1), row(seed=2)]
    assert drafting(rows, full) == {
        "accepted_per_verification": 10 / 5, "kept_share": 10 / 11, "passes_per_token": 16 / 15,
        "compared": 2, "differing": 1,
    }  # fmt: skip
    assert drafting(full, full) is None


def test_teacher_forcing_has_no_lossless_methods():
    methods = at_sizes([Method.parse("sfi"), Method.parse(LOSSLESS)], budgets=[24])
    assert [cell.method.label for cell in window_cells(methods, [40], count=1, tokens=4)] == ["sfi"]
    with pytest.raises(ConfigError, match="must have a method besides full-kv and lossless"):
        window_cells(methods[1:], [40], count=1, tokens=4)
