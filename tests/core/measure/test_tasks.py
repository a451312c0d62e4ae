"""The built-in tasks, and the grid of methods, sizes, tasks, lengths and seeds, on tiny random models."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import sfi_core
from sfi_core.bundled.example import HELD_OUT, draw
from sfi_core.errors import ConfigError, InputError, NumericsError
from sfi_core.measure.evaluation import samples
from sfi_core.measure.evaluation.grid import Method, at_sizes, key_of
from sfi_core.measure.evaluation.questions import depths, fit
from sfi_core.measure.evaluation.samples import SampleRows, sample_cells
from sfi_core.measure.evaluation.tasks import TASKS, WORDS, find_task
from sfi_core.models.load import load_tokenizer
from sfi_core.policies import POLICIES

RULER = [name for name, task in TASKS.items() if not task.bundled]
# drawn for prompt and answer together
SLACK = {"bundled-recall": 120, "bundled-recall-1": 80, "bundled-recall-30": 450}
START, END = "<s>", "</s>"
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(**options):
    """A token per byte, and a start token as many checkpoints have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, **options)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_is_as_near_below_the_length_as_its_units_allow(tokenizer, name):
    for seed, length in enumerate((1024, 1024, 4096)):
        sample = find_task(name).sample(tokenizer, length, seed)
        assert length - SLACK.get(name, 25) <= len(sample.prompt_ids) <= length
        assert sample.prompt_ids == tuple(tokenizer(sample.prompt)["input_ids"])


@pytest.mark.parametrize("waver", [0, 5, 20])
def test_the_largest_number_of_units_that_fits_is_found(waver):
    """Also where a longer document is drawn anew, and may take fewer tokens than a shorter one."""

    def tokens(units):
        return 10 + 7 * units + units * 37 % (waver + 1)

    for length in range(10, 4000, 3):
        units = fit("x", tokens, length)
        assert tokens(units) <= length < tokens(units + 1)


@pytest.mark.parametrize("name", RULER)
def test_a_tokenizer_of_single_bytes_will_do(name):
    sample = find_task(name).sample(byte_tokenizer(), 4000, 0)
    assert 3900 <= len(sample.prompt_ids) <= 4000
    assert sample.prompt_ids[0] == 0
    assert all(answer in sample.prompt for answer in sample.answers)


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_drawn_from_its_name_length_and_seed_alone(tokenizer, name):
    task = find_task(name)
    first = task.sample(tokenizer, 1024, 5)
    random.seed(1)
    assert task.sample(tokenizer, 1024, 5) == first
    assert (first.task, first.length, first.seed) == (name, 1024, 5)
    others = [task.sample(tokenizer, 1024, 6), task.sample(tokenizer, 2048, 5)]
    assert not {first.answers} & {other.answers for other in others} or task.bundled
    assert first.prompt not in [other.prompt for other in others]


@pytest.mark.parametrize("name", RULER)
def test_the_score_is_the_share_of_the_answers_that_the_text_holds(tokenizer, name):
    task = find_task(name)
    sample = task.sample(tokenizer, 2048, 0)
    some = sample.answers[: len(sample.answers) // 2]
    for said in (sample.answers, some, ()):
        text = "They are:\n" + ",\n and ".join(said)
        score = task.score(sample, [], text, tokenizer)["score"]
        assert score == len(said) / len(sample.answers)


@pytest.mark.parametrize("name", RULER)
def test_the_answers_stand_in_the_document_and_not_in_the_question(tokenizer, name):
    """What is asked for comes after the last blank line, where no answer may stand."""
    sample = find_task(name).sample(tokenizer, 2048, 2)
    document, question = sample.prompt.rsplit("\n\n", 1)
    assert all(answer in document.replace("\n", " ") for answer in sample.answers)
    assert not any(answer in question for answer in sample.answers)
    assert len(set(sample.answers)) == len(sample.answers)


def test_needles_lie_at_all_depths_over_the_seeds(tokenizer):
    places = [
        sample.prompt.index(sample.answers[0]) / len(sample.prompt)
        for sample in (find_task("niah-single").sample(tokenizer, 1024, s) for s in range(40))
    ]
    quarters = Counter(int(4 * place) for place in places)
    assert all(8 <= quarters[quarter] <= 12 for quarter in range(4)), quarters
    assert max(depths(3, 4)) - min(depths(3, 4)) == pytest.approx(0.75)


def test_a_chain_of_variables_leads_to_its_value(tokenizer):
    sample = find_task("variable-tracking").sample(tokenizer, 2048, 3)
    value = re.search(r"have the value (\d+),", sample.prompt)[1]
    reached = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt):
        if source in reached:  # a chain's assignments stand in order
            reached.add(name)
    assert reached == {value, *sample.answers}
    assert len(re.findall(r"VAR \w+ = ", sample.prompt)) == 10


@pytest.mark.parametrize("length", [700, 2048, 8192])
def test_common_words_are_ten_times_as_frequent_as_any_other(tokenizer, length):
    sample = find_task("common-words").sample(tokenizer, length, 1)
    counts = Counter(re.findall(r"\d+\. (\w+)", sample.prompt))
    rare = max(count for word, count in counts.items() if word not in sample.answers)
    assert min(counts[word] for word in sample.answers) >= 10 * rare
    assert not any(word != other and word in other for word in WORDS for other in WORDS)


def test_a_recalled_sentence_counts_only_word_for_word(tokenizer):
    task = find_task("sentence-recall")
    sample = task.sample(tokenizer, 2048, 0)
    right = "\n".join(sample.answers).replace(" the ", "\n the ")  # broken into lines of its own
    assert task.score(sample, [], right, tokenizer) == {"score": 1.0, "exact": 1.0}
    wrong = right.replace(" the ", " a ", 1)
    assert task.score(sample, [], wrong, tokenizer) == {"score": 7 / 8, "exact": 0.0}


def test_the_bundled_task_is_the_one_that_the_checkpoint_is_evaluated_with(tokenizer):
    for seed in range(3):
        drawn = draw(random.Random(HELD_OUT + seed), 2048, find_task("bundled-recall").asked)
        sample = find_task("bundled-recall").sample(tokenizer, 2048, seed)
        assert (sample.prompt, sample.answers) == (drawn.prompt, (drawn.answer,))


def test_the_bundled_task_is_right_when_every_token_is(tokenizer):
    task = find_task("bundled-recall")
    sample = task.sample(tokenizer, 1024, 0)
    answer = tokenizer(sample.answers[0], add_special_tokens=False)["input_ids"]
    right = [*answer, tokenizer.eos_token_id]
    assert len(right) < sample.max_new_tokens
    assert task.score(sample, right, "", tokenizer) == {"score": 1.0, "token_accuracy": 1.0}
    wrong = [right[0] + 1, *right[1:]]
    accuracy = (len(right) - 1) / len(right)
    assert task.score(sample, wrong, "", tokenizer) == {"score": 0.0, "token_accuracy": accuracy}
    assert task.score(sample, answer, "", tokenizer)["score"] == 0  # it does not stop


def test_a_chat_template_is_part_of_the_prompt_and_of_its_length():
    tokenizer = byte_tokenizer(chat_template=CHAT)
    sample = find_task("niah-single").sample(tokenizer, 3000, 0)
    assert sample.prompt.startswith("<s>[user]")
    assert "[end][assistant]The secret number of" in sample.prompt
    assert sample.prompt_ids.count(0) == 1
    assert 2900 < len(sample.prompt_ids) <= 3000


@pytest.mark.parametrize("name", TASKS)
def test_a_length_too_short_for_the_task_is_refused_with_the_shortest(tokenizer, name):
    with pytest.raises(InputError, match=rf"length must be at least \d+ for task '{name}', got 20"):
        find_task(name).sample(tokenizer, 20, 0)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_without_a_tokenizer_is_refused(name):
    with pytest.raises(InputError, match="must have a tokenizer, got none"):
        find_task(name).sample(None, 1024, 0)


TASK, LENGTH = "bundled-recall-1", 160
CLOCKS = ("decode_seconds", "tokens_per_second")


def cells_of(*methods, shares=(0.2, 0.4), tasks=(TASK,), lengths=(LENGTH,), seeds=(0, 1)):
    return sample_cells(at_sizes(list(map(Method.parse, methods)), shares=shares), tasks, lengths, seeds)


def timeless(rows):
    return [{name: row[name] for name in row if name not in CLOCKS} for row in rows]


@pytest.mark.exhaustive
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
    cells, rows = cells_of("full-kv", "quest", "streaming-llm", shares=(0.4,)), SampleRows(*loaded)
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
    ours = {key_of(row): row for row in timeless(rows.make(cells))}
    assert ours.keys() == expected.keys()
    for key, row in ours.items():
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
