"""lm-evaluation-harness's model `sfi` on tasks of local files; no network."""

import json
import socket
from importlib.util import find_spec

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sfi_core.errors import ConfigError, InputError
from tests.core.conftest import TINY

INSTALLED = find_spec("lm_eval") is not None and find_spec("accelerate") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="the eval extra is not installed")
if INSTALLED:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CachingLM
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from sfi_core.measure.evaluation import lm_eval_model
    from sfi_core.measure.evaluation.lm_eval_model import SfiLM

SMALL = {
    "slow_start": 1, "min_gap": 0, "span": 0, "sink": 1, "recent": 3, "budget": 2, "window_prefill": 2,
    "trigger_policy": "never",
}  # fmt: skip
STORY = "Belora hid a red lantern under the old bridge. Tamvex stole a blue kettle near the cold mill."
QUESTIONS = [
    {"q": f"{STORY} Belora hid", "choices": ["a red lantern", "a blue lantern"], "a": 0},
    {"q": f"{STORY} Tamvex stole a", "choices": ["red lantern", "blue kettle near", "map"], "a": 1},
    {"q": f"{STORY} Later, Jorash kept", "choices": ["a tiny", "a huge umbrella"], "a": 0},
]
PROMPTS = [{"q": STORY, "a": "x"}, {"q": f"{STORY} Nearby, Tamvex", "a": "x"}, {"q": "Later,", "a": "x"}]
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
def loaded(tiny_tokenizer, tmp_path_factory):
    """The folder of a random model with few positions, the model, and a tokenizer of its own size."""
    torch.manual_seed(1)
    sizes = {**TINY, "vocab_size": len(tiny_tokenizer), "max_position_embeddings": 128}
    config = Qwen3Config(**sizes, initializer_range=0.3, tie_word_embeddings=False)
    model, folder = Qwen3ForCausalLM(config).eval(), tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder, model, tiny_tokenizer


def write_task(folder, name, rows, settings):
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / f"{name}.yaml").write_text(COMMON.format(name=name, folder=folder) + settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    choice = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{a}}"\n' + METRICS
    write_task(path, "tiny_choice", QUESTIONS, choice)
    text = (
        'output_type: generate_until\ndoc_to_target: "{{a}}"\n'
        "generation_kwargs: {until: ['.'], max_gen_toks: 6}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    write_task(path, "tiny_text", PROMPTS, text)
    return path


def requests_of(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def plain(loaded):
    return HFLM(pretrained=loaded[1], tokenizer=loaded[2], backend="causal", batch_size=1)


def policied(loaded, policy, batch_size=1):
    return SfiLM(str(loaded[0]), policy, backend="torch", device="cpu", batch_size=batch_size, **SMALL)


def told(lm):
    return lm.get_model_info()["sfi"]


SCORED = [(row["q"], f" {choice}") for row in QUESTIONS for choice in row["choices"]]
GENERATED = [(row["q"], {"until": ["."], "max_gen_toks": 8}) for row in PROMPTS]


def test_no_request_has_no_answer(loaded):
    lm = SfiLM(pretrained=str(loaded[0]), device="cpu")
    assert lm.generate_until([], disable_tqdm=True) == lm._loglikelihood_tokens([], disable_tqdm=True) == []  # noqa: SLF001


def test_full_attention_scores_continuations_as_the_harness_does(loaded):
    scores = policied(loaded, "full-kv").loglikelihood(requests_of("loglikelihood", SCORED))
    expected = plain(loaded).loglikelihood(requests_of("loglikelihood", SCORED))
    assert [log for log, _ in scores] == pytest.approx([log for log, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_full_attention_generates_what_the_harness_does(loaded, batch_size):
    """A batch is ragged, padded on the left."""
    lm = policied(loaded, "full-kv", batch_size)
    texts = lm.generate_until(requests_of("generate_until", GENERATED))
    assert texts == plain(loaded).generate_until(requests_of("generate_until", GENERATED))
    assert any(texts)
    assert told(lm)["decoding_steps"] > 0
    ratios = ("read_ratio", "selection_ratio", "cache_read_ratio", "stored_ratio")
    assert [told(lm)[name] for name in ratios] == [1, 0, 1, 1]


def test_a_policy_decodes_a_continuation_but_not_its_first_token(loaded):
    pairs = [(STORY, " a red lantern under"), (STORY, " map")]
    lm = policied(loaded, "streaming-llm")
    longer, word = lm.loglikelihood(requests_of("loglikelihood", pairs))
    full = policied(loaded, "full-kv").loglikelihood(requests_of("loglikelihood", pairs))
    assert abs(longer[0] - full[0][0]) > 1e-3
    assert word == full[1]
    assert told(lm)["read_ratio"] == told(lm)["stored_ratio"] < 0.5  # streaming-llm evicts


def test_a_whole_text_is_scored_as_the_harness_does_beyond_the_models_positions(loaded):
    """Its windows have one token of context and as many to predict as the model has positions."""
    texts = [(STORY,), (" ".join([STORY] * 8),)]
    assert len(loaded[2](texts[1][0])["input_ids"]) > 128
    lm = policied(loaded, "full-kv")
    scores = lm.loglikelihood_rolling(requests_of("loglikelihood_rolling", texts))
    expected = plain(loaded).loglikelihood_rolling(requests_of("loglikelihood_rolling", texts))
    assert scores == pytest.approx(expected, rel=1e-4)


def test_a_context_too_long_for_the_model_loses_its_start(loaded, caplog):
    """The results are lm-eval's own all the same."""
    long = " ".join([STORY] * 8)
    lm, theirs = policied(loaded, "full-kv", 2), plain(loaded)
    asked = [(STORY, GENERATED[0][1]), (long, GENERATED[0][1])]
    texts = lm.generate_until(requests_of("generate_until", asked))
    assert texts == theirs.generate_until(requests_of("generate_until", asked))
    pairs = [(STORY, " a map"), (long, " a map")]
    scores = lm.loglikelihood(requests_of("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests_of("loglikelihood", pairs))
    assert [log for log, _ in scores] == pytest.approx([log for log, _ in expected], abs=1e-3)
    assert "1 contexts lost their start: 128 positions" in caplog.text


@pytest.mark.exhaustive
def test_a_task_gives_the_figures_of_lm_evals_own_model(loaded, folder):
    evaluations = [
        simple_evaluate(
            lm,
            tasks=["tiny_choice", "tiny_text"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
        for lm in (policied(loaded, "full-kv"), plain(loaded))
    ]
    assert evaluations[0]["results"] == evaluations[1]["results"]
    assert evaluations[0]["config"]["sfi"]["policy"] == "full-kv"


def test_the_choices_of_a_question_share_a_prefill(loaded, monkeypatch):
    seen, read = [], lm_eval_model.read_prompt

    def noted(*args, **options):
        seen.append(1)
        return read(*args, **options)

    monkeypatch.setattr(lm_eval_model, "read_prompt", noted)
    policied(loaded, "sfi").loglikelihood(requests_of("loglikelihood", SCORED))
    assert len(seen) == len(QUESTIONS)


def test_a_run_that_was_cut_goes_on_with_the_answers_of_its_cache(loaded, tmp_path, monkeypatch):
    score, answers = SfiLM._score, []  # noqa: SLF001

    def cut(*args):
        if len(answers) == 3:
            raise KeyboardInterrupt
        answers.append(score(*args))
        return answers[-1]

    asked = requests_of("loglikelihood", SCORED)
    whole = policied(loaded, "sfi").loglikelihood(asked)
    with monkeypatch.context() as patch:
        patch.setattr(SfiLM, "_score", cut)
        with pytest.raises(KeyboardInterrupt):
            CachingLM(policied(loaded, "sfi"), str(tmp_path / "cache.db")).loglikelihood(asked)
    scored = []
    monkeypatch.setattr(SfiLM, "_score", lambda *args: scored.append(1) or score(*args))
    assert CachingLM(policied(loaded, "sfi"), str(tmp_path / "cache.db")).loglikelihood(asked) == whole
    assert len(scored) == len(SCORED) - 3


def test_settings_of_a_table_and_of_lm_eval_reach_the_run():
    lm = SfiLM.create_from_arg_obj(
        {"selector.alpha": 0.25, "triggers": ["."], "preset": "paper", "max_length": 64, "device": "cpu"},
        {"device": "cuda:0", "batch_size": 3, "max_batch_size": None},
    )
    facts = told(lm)
    assert facts["config"]["selector"]["alpha"] == 0.25
    assert facts["config"]["recent_mode"] == "sliding"
    assert (lm.max_length, lm.batch_size) == (64, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bugdet": 3}, "bugdet"),
        ({"selector.alhpa": 3}, "alhpa"),
        ({"budget": 0}, "budget must be positive, got 0"),
        ({"policy": "h3o"}, "unknown policy 'h3o'"),
        ({"preset": "none"}, "unknown preset 'none'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"kv_device_budget": "much"}, "kv_device_budget must be a share"),
    ],
)
def test_mistakes_in_the_arguments_are_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        SfiLM(**{"device": "cpu", **arguments})
    assert "\n" not in str(caught.value)


def test_positions_are_those_of_scaled_rope(loaded):
    lm = policied(loaded, "full-kv")
    assert lm.max_length == 128
    lm.model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert lm.max_length == 512


def test_answers_that_fill_the_models_positions_are_refused(loaded):
    asked = requests_of("generate_until", [(STORY, {"until": ["."], "max_gen_toks": 128})])
    with pytest.raises(InputError, match=r"max_gen_toks must leave room in .* 128 positions, got 128"):
        policied(loaded, "sfi").generate_until(asked)
