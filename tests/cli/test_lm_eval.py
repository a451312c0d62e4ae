"""`sfi lm-eval`: lm-eval's own command line with the model `sfi`; no network."""

import json
import sys
from functools import partial
from importlib.util import find_spec

import pytest

from sfi_core.errors import BackendError, ConfigError
from sfi_core.measure.evaluation import lm_eval_run
from tests.cli.trace_commands import raising

INSTALLED = find_spec("lm_eval") is not None and find_spec("accelerate") is not None
needs_it = pytest.mark.skipif(not INSTALLED, reason="the eval extra is not installed")
TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/tiny.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "{{{{q}}}}"
output_type: multiple_choice
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{a}}}}"
metric_list: [{{metric: acc}}]
"""


call = partial(raising, "lm-eval")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of one task; lm-eval's own thousands, which take seconds to index, are left out."""
    from lm_eval import tasks  # noqa: PLC0415 - an extra

    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    story = "Belora hid a red lantern under the old bridge. Belora hid"
    row = {"q": story, "choices": [" a red lantern", " a green map"], "a": 0}
    (tmp_path / "tiny.jsonl").write_text(json.dumps(row))
    (tmp_path / "tiny.yaml").write_text(TASK.format(folder=tmp_path))
    return tmp_path


@needs_it
def test_a_task_runs_on_the_bundled_model_and_its_results_say_what_was_read(folder):
    before = sys.argv
    result = call(
        "--model_args", "policy=streaming-llm,budget=4,recent=4,device=cpu", "--tasks", "tiny_choice",
        "--include_path", folder, "--output_path", folder / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "|tiny_choice|" in result.stdout
    (file,) = (folder / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["config"]["sfi"]
    assert (found["policy"], found["config"]["budget"]) == ("streaming-llm", 4)
    assert 0 < found["read_ratio"] < 1
    assert sys.argv is before


@needs_it
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "sfi", "--tasks", "tiny_choise"], "lm-eval: Tasks not found: tiny_choise"),
        (["--model", "sfy", "--tasks", "tiny_choice"], "lm-eval: .*sfy"),
        (["--model", "sfi", "--model_args", "bugdet=3", "--tasks", "tiny_choice"], "bugdet"),
    ],
)
def test_a_mistake_is_one_line(folder, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        call(*arguments, "--include_path", folder)
    assert "\n" not in str(caught.value)


@needs_it
def test_help_before_a_command_is_ours_and_after_it_lm_evals():
    assert "sfi lm-eval run --help" in call("--help").stdout
    assert "lm-eval run --model <model>" in call("run", "--help").stdout


def test_without_lm_eval_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(lm_eval_run, "find_spec", lambda _: None)
    with pytest.raises(BackendError, match=r"needs lm_eval.*pip install .*\[eval\]"):
        call("--model", "sfi")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--tasks", "x"], ["run", "--model", "sfi", "--tasks", "x"]),
        (["run", "-t", "x"], ["run", "--model", "sfi", "-t", "x"]),
        *(
            (words, words)
            for words in (
                [], ["run"], ["ls", "tasks"], ["validate", "--tasks", "x"], ["run", "-h"], ["run", "--model=hf"],
                ["-M", "hf", "-t", "x"], ["run", "--config", "file.yaml"],
            )
        ),
    ],
)  # fmt: skip
def test_a_run_is_of_our_model_unless_it_names_one(words, wanted):
    assert lm_eval_run.with_model(words) == wanted
