"""`benchmarks/quality.sh`: its plan, its hours, and every line of it on a CPU."""

import importlib.util
import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sfi_core.errors import SfiError
from sfi_core.measure.evaluation.method import Method
from sfi_core.policies import POLICIES
from tests.core.conftest import tiny_qwen3

ROOT = Path(__file__).parents[2]
HARNESS = find_spec("lm_eval") is not None
SCRIPT = ROOT / "benchmarks" / "quality.sh"
LIMIT = 40_960  # positions


def _load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quality():
    for name in ("quality_parts", "quality_results"):
        _load(name)
    return _load("quality")


@pytest.fixture
def probe(quality):
    return quality.Probe(length=8192, prompt_token=1e-4, token=0.02)


def hours(parts, probe):
    return sum(part.seconds(25, probe) for part in parts) / 3600


def test_the_hours_are_those_of_prompts_and_answers(quality, probe):
    """A prompt of twice the probe's length takes four times as long; ours is read once for all methods."""
    part = {"name": "a", "task": "a", "prompt": 16384, "answer": 100, "documents": 3, "tasks": 2}
    read, decoded = 16384 * 1e-4 * 2, 100 * 0.02
    theirs = quality.Part(harness=True, **part)
    assert theirs.seconds(25, probe) == pytest.approx(60 + 6 * 25 * (read + decoded))
    ours = quality.Part(harness=False, **part)
    assert ours.seconds(25, probe) == pytest.approx(60 + 6 * (read + 25 * decoded))
    once = quality.Part(harness=True, decodes=False, **part)
    assert once.seconds(25, probe) == pytest.approx(60 + 6 * (read + decoded))


def test_a_model_is_asked_for_what_its_positions_hold(quality):
    names = [part.name for part in quality.parts_of(LIMIT, dry=False)]
    assert {"own-4096", "ruler-4096", "ruler-32768", "gsm8k_cot", "longbench2"} <= set(names)
    short = [part.name for part in quality.parts_of(8192, dry=False)]
    assert [name for name in short if "ruler" in name] == ["ruler-4096"]


@pytest.mark.parametrize("most", [30.0, 8.0, 4.0])
def test_documents_are_capped_by_the_hours(quality, probe, most):
    parts = quality.parts_of(LIMIT, dry=False)
    assert hours(parts, probe) > 30
    capped = quality.capped(parts, most, 25, probe)
    assert 0.8 * most < hours(capped, probe) <= most
    assert all(
        1 <= few.documents <= many.documents for few, many in zip(capped, parts, strict=True)
    )
    assert quality.capped(parts, None, 25, probe) == parts


def test_too_few_hours_are_refused_with_what_is_needed(quality, probe):
    with pytest.raises(
        SfiError, match=r"hours must be at least \d\.\d for a document of each task"
    ):
        quality.capped(quality.parts_of(LIMIT, dry=False), 0.1, 25, probe)


@pytest.mark.skipif(not HARNESS, reason="the eval extra is not installed")
def test_the_harness_has_the_tasks_by_these_names(quality, monkeypatch):
    parts = quality.parts_of(LIMIT, dry=False)
    find = find_spec
    own = sys.modules["quality_parts"]
    monkeypatch.setattr(
        own, "find_spec", lambda name: object() if name in ("wonderwords", "nltk") else find(name)
    )  # fmt: skip
    unknown = quality.Part(
        name="x", task="no-such-task", harness=True, prompt=9, answer=9, documents=1
    )
    kept, left_out = quality.known_parts([*parts, unknown], None)
    assert kept == parts
    assert left_out == ["x: lm-evaluation-harness does not have 'no-such-task' here"]
    monkeypatch.setattr(own, "find_spec", lambda name: None if name == "nltk" else object())
    kept, left_out = quality.known_parts(parts, None)
    assert "ruler" not in {part.task for part in kept}
    assert left_out[0] == "ruler-4096: it needs nltk; pip install wonderwords nltk"


def test_commands_name_methods_that_this_sfi_knows(quality):
    tiny_model = tiny_qwen3()
    methods = quality.methods_of(tiny_model, bundled=False, heads=None)
    policies = [Method.parse(method).policy for method in methods]
    assert set(policies) == {
        "full-kv",
        "sfi",
        "freekv",
        "synckv",
        "quest",
        "snapkv",
        "codescan",
    } & {*POLICIES}
    assert "synckv=synckv:synckv.heads=even,synckv.representatives=1" in methods  # of two KV heads
    given = quality.methods_of(tiny_model, bundled=False, heads="mine.json")
    assert "synckv=synckv:synckv.heads=mine.json" in given
    part = quality.Part(
        name="l", task="longbench2", harness=True, prompt=9, answer=0, documents=3, decodes=False
    )  # fmt: skip
    words = quality.command_of(part, "mine", methods, (8, 16), None, dry=False)
    assert words.count("--method") == 1
    assert shlex.join(words).startswith("eval --model mine --method full-kv --budget 8,16 ")


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not HARNESS or find_spec("matplotlib") is None, reason="the extras eval and plots are not installed"
)  # fmt: skip
def test_a_dry_run_goes_through_the_script_and_a_second_one_goes_on(environment, tmp_path):
    def run():
        return subprocess.run(
            [SCRIPT, "--dry-run", tmp_path / "out"],
            env=environment | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False,
            cwd=tmp_path,
        )  # fmt: skip

    first = run()
    assert first.returncode == 0, first.stderr
    assert "hours of this device in all" in first.stdout
    table = (tmp_path / "out" / "quality.md").read_text()
    assert "| method | size | own-256 | tiny_text | tiny_choice |" in table
    rows = [line.split("|")[1].strip() for line in table.splitlines() if " K 16 " in line]
    assert {"sfi", "paper", "released", "freekv", "synckv", "quest", "snapkv"} <= set(rows)
    assert (tmp_path / "out" / "quality.png").stat().st_size > 10_000
    lines = tmp_path / "out" / "own-256" / "samples.jsonl"
    kept = lines.read_text().splitlines()[:-3]
    lines.write_text("\n".join(kept) + "\n")
    before = (tmp_path / "out" / "plan.json").stat().st_mtime_ns
    assert run().returncode == 0
    assert lines.read_text().splitlines()[: len(kept)] == kept
    assert len(lines.read_text().splitlines()) == len(kept) + 3
    assert (tmp_path / "out" / "plan.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "out" / "own-256" / "manifest.json").read_text())["finished"]


def test_an_unknown_option_is_one_line():
    found = subprocess.run(
        [SCRIPT, "--fast"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (
        2, "error: option must be --hours or --dry-run, got --fast\n",
    )  # fmt: skip
