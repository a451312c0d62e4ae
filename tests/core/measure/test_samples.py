"""The grid of methods, sizes, tasks, lengths and seeds, on tiny random models."""

from dataclasses import replace

import pytest
import torch

import sfi_core
from sfi_core.errors import ConfigError, InputError, NumericsError
from sfi_core.measure.evaluation import samples
from sfi_core.measure.evaluation.grid import Method, at_sizes, key_of
from sfi_core.measure.evaluation.samples import SampleRows, sample_cells
from sfi_core.measure.evaluation.tasks import find_task
from sfi_core.policies import POLICIES

TASK, LENGTH = "bundled-recall-1", 160
CLOCKS = ("decode_seconds", "tokens_per_second")


def cells_of(*methods, shares=(0.2, 0.4), budgets=None, tasks=(TASK,), lengths=(LENGTH,), seeds=(0, 1)):
    sized = at_sizes(list(map(Method.parse, methods)), shares=shares, budgets=budgets, recent=16 if budgets else 128)
    return sample_cells(sized, tasks, lengths, seeds)


def timeless(rows):
    return [{name: row[name] for name in row if name not in CLOCKS} for row in rows]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_says_what_a_run_of_its_own_says(loaded, policy):
    """The prompt is shared between methods, the report's ratios go into the row as they are."""
    model, tokenizer = loaded
    method = {"full-kv": "sfi", "synckv": "synckv:synckv.heads=even"}.get(policy, policy)
    cells = cells_of("full-kv", method, seeds=(3,))
    rows = list(SampleRows(model, tokenizer).make(cells))
    sample = find_task(TASK).sample(tokenizer, LENGTH, 3)
    for row, cell in zip(rows, cells, strict=True):
        config = cell.method.config_for(len(sample.prompt_ids))
        result = sfi_core.generate(
            model, tokenizer, [sample.prompt_ids], config, policy=cell.method.policy,
            max_new_tokens=sample.max_new_tokens,
        )  # fmt: skip
        report = result.report.requests[0]
        for name in ("read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps"):
            assert row[name] == getattr(report, name)
        assert row["text"] == result.texts[0]
        assert row["generated"] == len(report.token_ids)
        scores = find_task(TASK).score(sample, report.token_ids, row["text"], tokenizer)
        assert {"score": row["score"], **row["scores"]} == scores
        assert row["expected"] == list(sample.answers)


def test_a_prompt_whose_rows_are_done_is_not_read(loaded, monkeypatch):
    cells, rows = cells_of("full-kv", "streaming-llm"), SampleRows(*loaded)
    whole = timeless(rows.make(cells))
    read = []
    read_prompt = samples.read_prompt
    monkeypatch.setattr(samples, "read_prompt", lambda *a, **k: read.append(1) or read_prompt(*a, **k))
    assert timeless(rows.make(cells[4:])) == whole[4:]
    assert len(read) == 1  # the first prompt had all its rows
    assert list(rows.make([])) == []


def test_what_fails_leaves_the_other_rows(loaded, monkeypatch):
    """A method that needs too much memory, and one whose logits break for one prompt."""
    cells, rows = cells_of("full-kv", "quest", "streaming-llm", budgets=[24]), SampleRows(*loaded)
    expected = {key_of(row): row for row in timeless(rows.make(cells))}
    broken = find_task(TASK).sample(loaded[1], LENGTH, 1).prompt_ids
    decode = samples.generate

    def scarce(model, tokenizer, prompts, *args, policy, **options):
        if policy == "quest":
            raise torch.OutOfMemoryError("no memory")
        result = decode(model, tokenizer, prompts, *args, policy=policy, **options)
        if policy == "streaming-llm" and broken in prompts:
            return replace(result, error=NumericsError("logits must be finite"))
        return result

    monkeypatch.setattr(samples, "generate", scarce)
    found = {key_of(row): row for row in timeless(rows.make(cells))}
    assert found.keys() == expected.keys()
    for key, row in found.items():
        if key[0] == "quest":
            assert (row["error"], row["score"]) == ("no memory", None)
        elif key[0] == "streaming-llm" and key[-1] == 1:
            assert (row["error"], row["score"]) == ("logits must be finite", None)
        else:
            assert row == expected[key]


def test_ctrl_c_ends_the_run_between_rows(loaded, monkeypatch):
    decode = samples.generate
    monkeypatch.setattr(samples, "generate", lambda *a, **k: replace(decode(*a, **k), interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        list(SampleRows(*loaded).make(cells_of("full-kv")))


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (2000, "length must be at most the model's 1024 positions, got 2000"),
        (1024, "task 'niah-single' of length 1024 must fit the model's 1024 positions, got 10.. prompt and"),
    ],
)
def test_a_context_beyond_the_model_is_refused_at_once(loaded, length, message):
    """1,024 tokens fit its positions, the answer to them does not."""
    with pytest.raises(InputError, match=message):
        SampleRows(*loaded).check(cells_of("sfi", lengths=(500, length), tasks=("niah-single",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("niah",)}, "unknown task 'niah'; expected one of"),
        ({"methods": ()}, "method must be given at least once, got none"),
        ({"seeds": ()}, "sample must be given at least once, got none"),
        ({"lengths": (8, 8)}, "each length must differ, got 8, 8"),
        ({"methods": ("a=sfi", "a=quest")}, "each method must differ"),
        ({"lengths": (0,)}, "length must be positive, got 0"),
    ],
)
def test_grids_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        cells_of(*change.pop("methods", ["sfi"]), **change)
