"""lm-evaluation-harness tasks from local files, with the model decoding under a policy; no network."""

import copy
import json
import math
import socket
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sfi_core import SfiConfig
from sfi_core.errors import BackendError, ConfigError, InputError
from sfi_core.measure.evaluation import harness
from sfi_core.measure.evaluation.harness import evaluate_harness
from sfi_core.measure.evaluation.harness_grid import HarnessGrid
from sfi_core.measure.evaluation.method import Method

INSTALLED = find_spec("lm_eval") is not None and find_spec("accelerate") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="the eval extra is not installed")
if INSTALLED:
    import lm_eval
    from lm_eval import evaluate, simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from sfi_core.measure.evaluation.harness_model import PolicyLM

SMALL = SfiConfig(
    slow_start=1,
    min_gap=0,
    span=0,
    sink=1,
    recent=3,
    budget=2,
    window_prefill=2,
    trigger_policy="never",
)
STORY = (
    "Belora hid a red lantern under the old bridge. Tamvex stole a blue kettle near the cold mill."
)
QUESTIONS = [
    {"q": f"{STORY} Belora hid", "choices": ["a red lantern", "a blue lantern"], "a": 0},
    {"q": f"{STORY} Tamvex stole a", "choices": ["red lantern", "blue kettle near", "map"], "a": 1},
    {"q": f"{STORY} Later, Jorash kept", "choices": ["a tiny", "a huge umbrella"], "a": 0},
]
PROMPTS = [
    {"q": STORY, "a": "x"},
    {"q": f"{STORY} Nearby, Tamvex", "a": "x"},
    {"q": "Later,", "a": "x"},
]
METRICS = "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
COMMON = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refused(*_):
        raise AssertionError("a test must not reach for the network")

    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer):
    """A random model of few tokens' memory, and a tokenizer of its own size."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval(), tiny_tokenizer


def write_task(folder, name, rows, settings):
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / f"{name}.yaml").write_text(COMMON.format(name=name, folder=folder) + settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    choice = (
        'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{a}}"\n'
        + METRICS
    )
    write_task(path, "tiny_choice", QUESTIONS, choice)
    words = [{"q": q, "choices": ["map", "urn"], "a": 0} for q in (STORY, f"{STORY} Later")]
    write_task(path, "tiny_words", words, choice + "fewshot_split: test\n")
    text = (
        'output_type: generate_until\ndoc_to_target: "{{a}}"\n'
        "generation_kwargs: {{until: ['.'], max_gen_toks: {most}}}\n"
        "metric_list: [{{metric: exact_match}}]\n"
    )
    write_task(path, "tiny_text", PROMPTS, text.format(most=6))
    write_task(path, "tiny_long", PROMPTS, text.format(most=128))
    write_task(path, "tiny_unsafe", PROMPTS, text.format(most=6) + "unsafe_code: true\n")
    write_task(path, "tiny_lost", PROMPTS, text.format(most=6))
    (path / "tiny_lost.jsonl").unlink()
    return path


def requests_of(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)
    ]


def plain(loaded):
    return HFLM(pretrained=loaded[0], tokenizer=loaded[1], backend="causal", batch_size=1)


def policied(loaded, policy, batch_size=1):
    return PolicyLM(*loaded, policy, SMALL, batch_size, "torch", None)


SCORED = [(row["q"], f" {choice}") for row in QUESTIONS for choice in row["choices"]]
GENERATED = [(row["q"], {"until": ["."], "max_gen_toks": 8}) for row in PROMPTS]


def test_full_attention_scores_continuations_as_the_harness_does(loaded):
    found = policied(loaded, "full-kv").loglikelihood(requests_of("loglikelihood", SCORED))
    expected = plain(loaded).loglikelihood(requests_of("loglikelihood", SCORED))
    assert [log for log, _ in found] == pytest.approx([log for log, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_continuation_is_greedy_only_as_a_whole(loaded):
    context = loaded[1](STORY)["input_ids"]
    ids = torch.tensor([context])
    greedy = loaded[0].generate(ids, max_new_tokens=3, do_sample=False)[0, len(context) :].tolist()
    asked = [(None, context, greedy), (None, context, [*greedy[:2], greedy[2] + 1])]
    for lm in (policied(loaded, "full-kv"), plain(loaded)):
        found = lm._loglikelihood_tokens(asked)  # noqa: SLF001
        assert [is_greedy for _, is_greedy in found] == [True, False]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_full_attention_generates_what_the_harness_does(loaded, batch_size):
    """A batch is ragged, padded on the left."""
    lm = policied(loaded, "full-kv", batch_size)
    found = lm.generate_until(requests_of("generate_until", GENERATED))
    assert found == plain(loaded).generate_until(requests_of("generate_until", GENERATED))
    assert any(found)
    assert lm.decoding
    assert lm.ratios() == {"read_ratio": 1, "selection_ratio": 0, "stored_ratio": 1}


def test_a_policy_decodes_a_continuation_but_not_its_first_token(loaded):
    pairs = [(STORY, " a red lantern under"), (STORY, " map")]
    lm = policied(loaded, "streaming-llm")
    longer, word = lm.loglikelihood(requests_of("loglikelihood", pairs))
    full = policied(loaded, "full-kv").loglikelihood(requests_of("loglikelihood", pairs))
    assert abs(longer[0] - full[0][0]) > 1e-3
    assert word == full[1]
    assert lm.ratios()["read_ratio"] == lm.ratios()["stored_ratio"] < 0.5  # it evicts


def test_a_policy_acts_on_generated_text(loaded):
    found = policied(loaded, "streaming-llm").generate_until(
        requests_of("generate_until", GENERATED)
    )
    assert found != plain(loaded).generate_until(requests_of("generate_until", GENERATED))


def test_a_whole_text_is_scored_as_the_harness_does_beyond_the_models_positions(loaded):
    """Its windows have one token of context and as many to predict as the model has positions."""
    texts = [(STORY,), (" ".join([STORY] * 8),)]
    assert len(loaded[1](texts[1][0])["input_ids"]) > 128
    lm = policied(loaded, "full-kv")
    found = lm.loglikelihood_rolling(requests_of("loglikelihood_rolling", texts))
    expected = plain(loaded).loglikelihood_rolling(requests_of("loglikelihood_rolling", texts))
    assert found == pytest.approx(expected, rel=1e-4)


def test_contexts_that_lose_their_start_are_counted(loaded):
    """The results are the harness's own all the same."""
    long = " ".join([STORY] * 8)
    lm, theirs = policied(loaded, "full-kv", 2), plain(loaded)
    asked = [(STORY, GENERATED[0][1]), (long, GENERATED[0][1])]
    found = lm.generate_until(requests_of("generate_until", asked))
    assert found == theirs.generate_until(requests_of("generate_until", asked))
    assert lm.truncated == 1
    pairs = [(STORY, " a map"), (long, " a map")]
    found = lm.loglikelihood(requests_of("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests_of("loglikelihood", pairs))
    assert [log for log, _ in found] == pytest.approx([log for log, _ in expected], abs=1e-3)
    assert lm.truncated == 2


def test_tasks_give_a_row_for_every_metric(loaded, folder):
    rows = evaluate_harness(
        *loaded, ["tiny_choice", "tiny_text"], "full-kv", SMALL, include_path=folder
    )
    assert [(row.task, row.metric, row.samples) for row in rows] == [
        ("tiny_choice", "acc", 3),
        ("tiny_choice", "acc_norm", 3),
        ("tiny_text", "exact_match", 3),
    ]
    assert {(row.decoding, row.read_ratio, row.truncated) for row in rows} == {(True, 1.0, 0)}
    share = rows[0].value
    assert share in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
    assert rows[0].stderr == pytest.approx(math.sqrt(share * (1 - share) / 2))


def test_the_rows_are_the_harnesss_own(loaded, folder):
    manager = harness.task_manager(folder, defaults=False)
    results = simple_evaluate(
        plain(loaded), tasks=["tiny_choice"], task_manager=manager, bootstrap_iters=0
    )
    rows = evaluate_harness(*loaded, ["tiny_choice"], "full-kv", SMALL, include_path=folder)
    expected = results["results"]["tiny_choice"]
    assert {row.metric: row.value for row in rows} == {
        name: expected[f"{name},none"] for name in ("acc", "acc_norm")
    }


def test_answers_of_one_token_are_marked_as_beyond_the_policys_reach(loaded, folder):
    (row, _) = evaluate_harness(*loaded, ["tiny_words"], "sfi", SMALL, include_path=folder)
    assert not row.decoding
    assert row.read_ratio == 1


def test_a_task_that_makes_its_prompts_is_told_tokenizer_and_lengths(loaded, folder):
    """As RULER's tasks do: `custom_dataset` takes both, and reports a length without prompts as -1."""
    (folder / "made.py").write_text(
        "import datasets\n"
        "def make(tokenizer=None, max_seq_lengths=(), **_):\n"
        "    rows = [{'q': f'{tokenizer} {n}', 'n': n} for n in max_seq_lengths]\n"
        "    return {'test': datasets.Dataset.from_list(rows)}\n"
        "def score(doc, results):\n"
        "    return {'4096': -1.0, str(doc['n']): float(doc['q'].startswith('mine/tokenizer '))}\n"
        "def mean(values):\n"
        "    known = [value for value in values if value != -1]\n"
        "    return sum(known) / len(known) if known else -1\n"
    )
    metrics = [f"{{metric: '{n}', aggregation: !function made.mean}}" for n in (4096, 8192, 16384)]
    (folder / "made_lengths.yaml").write_text(
        "task: made_lengths\ndataset_path: ''\ndataset_name: ''\noutput_type: generate_until\n"
        "test_split: test\ncustom_dataset: !function made.make\ndoc_to_text: '{{q}}'\ndoc_to_target: x\n"
        "process_results: !function made.score\ngeneration_kwargs: {until: [], max_gen_toks: 4}\n"
        f"metric_list: [{', '.join(metrics)}]\n"
    )
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.name_or_path = "mine/tokenizer"
    found = evaluate_harness(
        loaded[0], tokenizer, ["made_lengths"], "sfi", SMALL, include_path=folder, lengths=(1024, 8192, 16384)
    )  # fmt: skip
    assert [(row.metric, row.value, row.samples) for row in found] == [
        ("8192", 1.0, 2), ("16384", 1.0, 2),
    ]  # fmt: skip


def test_tasks_that_are_loaded_once_serve_several_methods(loaded, folder):
    tasks = ["tiny_choice", "tiny_text"]
    once = harness.load_tasks(tasks, folder)
    for policy in ("full-kv", "streaming-llm", "full-kv"):
        found = evaluate_harness(*loaded, tasks, policy, SMALL, loaded=once, include_path=folder)
        anew = evaluate_harness(*loaded, tasks, policy, SMALL, include_path=folder)
        assert found == anew


def test_a_limit_counts_documents_and_progress_is_told(loaded, folder):
    told = []
    rows = evaluate_harness(
        *loaded,
        ["tiny_text", "tiny_choice"],
        "sfi",
        SMALL,
        include_path=folder,
        limit=2,
        on_request=lambda done, total: told.append((done, total)),
    )
    assert {row.samples for row in rows} == {2}
    assert told == [(1, 2), (2, 2), *((done, 5) for done in range(1, 6))]


@pytest.fixture
def contexts(monkeypatch):
    """The contexts that the model reads, as tokens."""
    seen, read = [], PolicyLM._read  # noqa: SLF001

    def watched(lm, prompt, most):
        seen.append(prompt)
        return read(lm, prompt, most)

    monkeypatch.setattr(PolicyLM, "_read", watched)
    return seen


def test_examples_and_the_chat_template_reach_the_model(loaded, folder, contexts):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    options = {"include_path": folder, "limit": 1}
    evaluate_harness(model, tokenizer, ["tiny_words"], "sfi", SMALL, **options)
    evaluate_harness(model, tokenizer, ["tiny_words"], "sfi", SMALL, **options, num_fewshot=1)
    evaluate_harness(model, tokenizer, ["tiny_words"], "sfi", SMALL, **options, chat=True)
    bare, example, chat = (tokenizer.decode(ids, skip_special_tokens=True) for ids in contexts)
    assert bare == STORY
    assert example.count("Belora hid") == 2
    assert chat == f"<{STORY}>"


def test_the_choices_of_a_question_share_a_prefill(loaded, folder, contexts):
    evaluate_harness(*loaded, ["tiny_choice"], "sfi", SMALL, include_path=folder)
    assert len(contexts) == len(QUESTIONS)


def test_what_the_harness_prints_does_not_mix_with_data(loaded, folder, monkeypatch, capsys):
    """It prints as soon as a standard error takes bootstrapping."""

    def talkative(*args, **kwargs):
        sys.stdout.write("bootstrapping for stddev\n")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(lm_eval, "evaluate", talkative)
    evaluate_harness(*loaded, ["tiny_text"], "sfi", SMALL, include_path=folder)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "bootstrapping" in printed.err


def test_the_model_is_itself_again(loaded, folder):
    model = loaded[0]
    evaluate_harness(*loaded, ["tiny_choice", "tiny_text"], "sfi", SMALL, include_path=folder)
    assert not any("sfi_seam" in module.__dict__ for module in model.modules())
    assert "generate" not in model.__dict__


def test_a_missing_harness_is_named_with_how_to_install_it(loaded, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"need lm_eval.*pip install 'sfi-toolkit\[eval\]'"):
        evaluate_harness(*loaded, ["tiny_text"])


def test_an_unknown_task_is_refused_with_how_to_list_them(loaded, folder, monkeypatch):
    own = harness.task_manager(folder, defaults=False)  # the harness's own take seconds to index
    monkeypatch.setattr(harness, "task_manager", lambda path, *_, defaults: own)
    with pytest.raises(ConfigError, match="unknown lm-eval task 'tiny_txt'; `lm-eval ls tasks`"):
        evaluate_harness(*loaded, ["tiny_text", "tiny_txt"], include_path=folder)


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("tiny_lost", ConfigError, "lm-eval task 'tiny_lost' cannot be loaded: .*tiny_lost.jsonl"),
        ("tiny_unsafe", ConfigError, "'tiny_unsafe' runs code that the model writes"),
        ("tiny_long", InputError, "max_gen_toks must leave room in .* 128 positions, got 128"),
    ],
)
def test_a_task_that_cannot_run_is_refused_in_one_line(loaded, folder, task, error, message):
    with pytest.raises(error, match=message) as caught:
        evaluate_harness(*loaded, [task], "sfi", SMALL, include_path=folder)
    assert "\n" not in str(caught.value)


def test_a_task_whose_answers_fill_the_models_positions_is_refused_before_it_runs(loaded, folder):
    """A task of short answers, and multiple choice, are let through."""
    grid = {"methods": (Method.parse("sfi"),), "sizes": (), "include_path": folder, "limit": 1}
    HarnessGrid(tasks=("tiny_text", "tiny_choice"), **grid).check(*loaded)
    with pytest.raises(
        InputError, match=r"'tiny_long' must leave room in .* 128 positions, got answers of 128"
    ):
        HarnessGrid(tasks=("tiny_text", "tiny_long"), **grid).check(*loaded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit must be positive, got 0"),
        ({"num_fewshot": -1}, "num_fewshot must be at least 0, got -1"),
        ({"chat": True}, "chat needs a tokenizer with a chat template"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(loaded, folder, options, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_harness(*loaded, ["tiny_text"], include_path=folder, **options)


def test_an_include_path_must_be_a_folder(loaded, tmp_path):
    with pytest.raises(ConfigError, match="include path must be a folder of task files, got "):
        evaluate_harness(*loaded, ["tiny_text"], include_path=tmp_path / "none")
