"""`sfi eval` and `sfi lm-eval`: what they write, show, refuse and go on with; no network."""

import json
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from random import Random

import pytest

from sfi_cli.commands.evaluate import METHODS as DEFAULT_METHODS
from sfi_core.bundled.example import draw
from sfi_core.errors import BackendError, ConfigError, InputError, MemoryForecastError
from sfi_core.measure.evaluation import lm_eval_run
from sfi_core.measure.evaluation import samples as sample_rows
from sfi_core.measure.evaluation.grid import Method
from sfi_core.measure.evaluation.samples import SampleRows
from sfi_core.measure.evaluation.tasks import TASKS
from sfi_core.models import load as core_model
from sfi_core.policies import POLICIES
from tests.cli.trace_commands import raising

SMALL = ["--length", "128", "--samples", "2", "--share", "0.2,0.5", "--task", "bundled-recall-1"]
METHODS = ["--method", "full-kv", "--method", "wide=sfi:span=4,slow_start=2", "--method", "quest"]
CLOCKS = ("decode_seconds", "tokens_per_second")


call = partial(raising, "eval")


def samples(folder):
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name not in CLOCKS} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "whole"
    result = call(*SMALL, *METHODS, "-o", folder, "--json")
    assert result.exit_code == 0
    return folder, json.loads(result.stdout)


def test_the_folder_has_every_sample_and_the_manifest(whole):
    folder, document = whole
    rows = samples(folder)
    assert Counter((row["method"], row["size"]) for row in rows) == {
        ("full-kv", "all"): 2, ("wide", "20%"): 2, ("wide", "50%"): 2, ("quest", "20%"): 2,
        ("quest", "50%"): 2,
    }  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["finished"] == document["finished"] is not None
    assert document["samples"] == str(folder / "samples.jsonl")
    assert manifest["model"]["name"] == "bundled"
    assert manifest["machine"]["processor"]
    assert [method["label"] for method in manifest["methods"]] == ["full-kv", "wide", "quest"]


def test_the_table_has_the_numbers_of_the_json(whole):
    folder, document = whole
    text = call("-o", folder, "--resume").stdout
    scores, costs = text.split("tokens/s")
    for row in document["rows"]:
        line = next(line for line in costs.splitlines() if line.split()[:1] == [row["method"]])
        assert f" {row['read']:.1%} " in line
        assert f" {row['stored_ratio']:.1%} " in line
        line = next(line for line in scores.splitlines() if line.split()[:1] == [row["method"]])
        assert f" {row['score']:.2f}     {row['low']:.2f}-{row['high']:.2f} " in line


def test_a_complete_folder_is_shown_again_without_the_model(whole, monkeypatch):
    folder, document = whole
    monkeypatch.setattr(core_model, "load", None)
    before = (folder / "manifest.json").read_bytes()
    assert json.loads(call("-o", folder, "--resume", "--json").stdout) == document
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.exhaustive
def test_ctrl_c_keeps_what_is_there_and_resume_ends_as_if_nothing_had_been(whole, tmp_path, monkeypatch):
    folder = tmp_path / "cut"
    run = SampleRows.make

    def interrupted(*args, **options):
        for count, row in enumerate(run(*args, **options)):
            if count == 3:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(SampleRows, "make", interrupted)
        result = call(*SMALL, *METHODS, "-o", folder)
    assert result.exit_code == 130
    assert f"interrupted; go on with: sfi eval -o {folder} --resume" in result.stderr
    assert "not complete: interrupted" in result.stdout
    assert "wide" in result.stdout
    assert len(samples(folder)) == 3
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"method": "wide", "sco')  # as if the power had gone
    result = call("-o", folder, "--resume")
    assert result.exit_code == 0
    assert samples(folder) == samples(whole[0])


@pytest.mark.exhaustive
def test_what_failed_is_tried_again(whole, tmp_path, monkeypatch):
    folder = tmp_path / "failed"
    generate = sample_rows.generate

    def scarce(*args, policy, **options):
        if policy == "quest":
            raise MemoryForecastError("the run must fit")
        return generate(*args, policy=policy, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sample_rows, "generate", scarce)
        text = call(*SMALL, *METHODS, "-o", folder).stdout
    assert "failed (2 times): quest at 20%, bundled-recall-1, 128 tokens: the run must fit" in text
    call("-o", folder, "--resume")
    assert sorted(samples(folder), key=str) == sorted(samples(whole[0]), key=str)
    document = json.loads(call("-o", folder, "--resume", "--json").stdout)
    assert [row["failed"] for row in document["rows"]] == [0] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "3"], "resume must keep the folder's samples 2, got 3"),
        (["--share", "0.1"], r"resume must keep the folder's share 0\.2,0\.5, got 0\.1"),
        (["--model", "other"], "resume must keep the folder's model None, got other"),
        (["--method", "sfi"], "resume must keep the folder's method full-kv,wide=.*, got sfi"),
        (["--fidelity", "a.txt"], "resume must keep the folder's fidelity None, got a.txt"),
    ],
)
def test_resume_refuses_another_request(whole, arguments, message):
    with pytest.raises(ConfigError, match=message):
        call("-o", whole[0], "--resume", *arguments)


@pytest.mark.parametrize("what", ["model", "methods"])
def test_resume_refuses_another_model_and_other_presets(whole, tmp_path, what):
    folder = tmp_path / "other"
    folder.mkdir()
    manifest = json.loads((whole[0] / "manifest.json").read_text()) | {"finished": None}
    (manifest["model"] if what == "model" else manifest["methods"][1]["config"]).update(weight_bytes=7)
    manifest["versions"]["sfi"] = "0.0.1"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    message = f"keep the {what} in the folder's manifest.json, got another; the folder is of sfi 0.0.1, this is "
    with pytest.raises(ConfigError, match=message):
        call("-o", folder, "--resume")


def test_a_folder_that_is_there_is_not_overwritten(whole):
    with pytest.raises(ConfigError, match="exists; add --resume to go on with it, --force"):
        call(*SMALL, "-o", whole[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sfl"], r"unknown policy 'sfl'; did you mean 'sfi'\? expected one of"),
        (["--share", "lots"], "share must be numbers with commas between, got 'lots'"),
        (["--length", "1.5"], "length must be whole numbers with commas between, got '1.5'"),
        (["--set", "eval.windows=0"], "eval.windows must be at least 1, got 0"),
        (["--tokens", "9"], "tokens must come with --fidelity, got it alone"),
        (["--resume"], "resume must come with --output DIR, got none"),
        (["--plot", "a.png", "--fidelity", "a.txt"], "plot shows scores and must come with --task"),
        (["--plot", "a.pdf"], r"plot must end in one of \('.png', '.svg'\), got a.pdf"),
    ],
)
def test_mistakes_show_before_the_model_loads(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core_model, "load", None)
    with pytest.raises(ConfigError, match=message):
        call(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "128,20000"], "length must be at most the model's 16384 positions, got 20000"),
        (["--length", "128", "--fidelity", "{tmp}/none.txt"], r"none\.txt cannot be read: No such file"),
        (["--length", "900", "--fidelity", "{tmp}/text.txt"], "text must have at least .* tokens"),
        (["--resume"], "results folder .*/results must hold an evaluation, got none to go on with"),
    ],
)
def test_what_cannot_be_read_leaves_no_folder(arguments, message, tmp_path):
    (tmp_path / "text.txt").write_text("Belora hid a red lantern under the old bridge. " * 20)
    filled = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    with pytest.raises(InputError, match=message):
        call(*filled, "-o", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_fidelity_lies_beside_the_tasks(tmp_path):
    text = tmp_path / "text.txt"
    drawn = draw(Random(5), 200, 5)
    sample = drawn.prompt + drawn.answer
    text.write_text(sample)
    folder = tmp_path / "results"
    arguments = [
        *SMALL[:2], "--samples", "1", "--share", "0.3", "--task", "bundled-recall-1", "--method", "sfi",
        "--method", "full-kv", "--fidelity", text, "--tokens", "12", "--set", "eval.windows=2", "-o", folder,
    ]  # fmt: skip
    document = json.loads(call(*arguments, "--json").stdout)
    assert [row["method"] for row in document["rows"]] == ["sfi", "full-kv"]
    (row,) = document["fidelity"]
    assert (row["method"], row["windows"], row["steps"]) == ("sfi", 2, 2 * 11)
    shown = call("-o", folder, "--resume").stdout
    assert f"{row['kl']:.4f}" in shown
    assert "fidelity to full attention, 128 prompt tokens, 2 windows of 12 tokens" in shown
    text.write_text(sample + " more")
    with pytest.raises(ConfigError, match="resume must keep the text in the folder"):
        call("-o", folder, "--resume")


EXTENDED = ("freekv:freekv.tau=0.9", "synckv:synckv.heads=even")


@pytest.mark.exhaustive
def test_extended_methods_decode_the_same_under_a_device_budget(tmp_path):
    """The prompt is read once, on the device; a run in two tiers begins with a copy."""
    methods = [word for method in (*EXTENDED, "full-kv") for word in ("--method", method)]
    asked = (*SMALL[:2], "--samples", "1", *SMALL[4:], *methods, "--set", "engine.kv_page=8")
    call(*asked, "-o", tmp_path / "whole", "-q")
    call(*asked, "-o", tmp_path / "tiers", "-q", "--kv-device-budget", "4MB")
    whole, tiers = samples(tmp_path / "whole"), samples(tmp_path / "tiers")
    assert {row["method"] for row in tiers} == {*EXTENDED, "full-kv"}
    assert [row["error"] for row in tiers] == [None] * len(whole)
    assert whole == tiers
    manifest = json.loads((tmp_path / "tiers" / "manifest.json").read_text())
    assert manifest["asked"]["kv_device_budget"] == "4MB"
    with pytest.raises(ConfigError, match="must keep the folder's kv-device-budget 4MB, got 5MB"):
        call("-o", tmp_path / "tiers", "--resume", "--kv-device-budget", "5MB")
    with pytest.raises(ConfigError, match="kv_device_budget must hold sink"):
        call(*asked, "-o", tmp_path / "small", "-q", "--kv-device-budget", "1kB")


def test_the_default_methods_are_all_policies_and_presets_but_the_ablation():
    methods = [Method.parse(text) for text in DEFAULT_METHODS]
    assert {method.policy for method in methods} == set(POLICIES) - {"prior-only"}
    presets = [method.preset for method in methods if method.policy == "sfi"]
    assert presets == ["default", "paper", "released"]
    assert [method.label for method in methods if method.policy == "sfi"] == ["sfi", "sfi@paper", "sfi@released"]


def test_tasks_are_listed_without_a_model(monkeypatch):
    monkeypatch.setattr(core_model, "load", None)
    lines = call("--list-tasks").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="the plots extra is not installed")
def test_the_plot_is_drawn_from_a_folder(whole, tmp_path):
    path = tmp_path / "plot.svg"
    call("-o", whole[0], "--resume", "--plot", path, "--quiet")
    assert "<!-- wide -->" in path.read_text()
    with pytest.raises(ConfigError, match="exists; add --force to overwrite it"):
        call("-o", whole[0], "--resume", "--plot", path)


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


harness = partial(raising, "lm-eval")


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
    result = harness(
        "--model_args", "policy=streaming-llm,budget=4,recent=4,device=cpu", "--tasks", "tiny_choice",
        "--include_path", folder, "--output_path", folder / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "|tiny_choice|" in result.stdout
    (file,) = (folder / "out").rglob("results_*.json")
    section = json.loads(file.read_text())["config"]["sfi"]
    assert (section["policy"], section["config"]["budget"]) == ("streaming-llm", 4)
    assert 0 < section["read_ratio"] < 1
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
        harness(*arguments, "--include_path", folder)
    assert "\n" not in str(caught.value)


@needs_it
def test_help_before_a_command_is_ours_and_after_it_lm_evals():
    assert "sfi lm-eval run --help" in harness("--help").stdout
    assert "lm-eval run --model <model>" in harness("run", "--help").stdout


def test_without_lm_eval_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("sfi_core.errors.find_spec", lambda _: None)
    with pytest.raises(BackendError, match=r"needs lm_eval.*pip install .*\[eval\]"):
        harness("--model", "sfi")


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
