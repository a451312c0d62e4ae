"""install.sh, benchmarks/gpu.sh, its smoke run and vllm.sh, with stand-ins for GPU, vLLM and Python."""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.gpu_parts import Parts
from benchmarks.smoke import journal
from benchmarks.smoke.plan import dry
from benchmarks.smoke.timeline import summed
from benchmarks.vllm_parts import differences, table
from sfi_cli import app as cli
from sfi_cli.commands import kernel_bench as kernel_job
from sfi_cli.commands.bench import command as bench_job
from sfi_cli.commands.generate import job as generate_job
from sfi_core.measure.kernel_bench.settings import KernelSettings
from tests.test_layers import ROOT

BUDGET = 540
STUB = """#!/usr/bin/env bash
# stands in for Python: the parts fail, end or take their time by name
case "$*" in
  *"import xdist"*) exit 1 ;;
  *smoke.py*) echo "blocking=${CUDA_LAUNCH_BLOCKING:-0} $*"; exit 3 ;;
  *gpu_parts.py\\ decode-eager\\ *) sleep 60 ;;
  *) exit 0 ;;
esac
"""


def script(*words: str, name: str = "gpu.sh", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/env", "bash", str(ROOT / "benchmarks" / name), *words],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("parts", ["1", "2", "3", ".", "decode"])
def test_the_limits_of_every_run_fit_its_budget(parts: str):
    plan = re.findall(r"^(\S+) +run \d +(\d+) s$", script("--plan", PARTS=parts).stdout, re.MULTILINE)
    assert plan
    assert BUDGET * 0.95 < sum(int(seconds) for _, seconds in plan) <= BUDGET


def test_what_is_no_part_is_refused():
    for words, environment in ((["--dry"], {}), ([], {"PARTS": "nothing"}), ([], {"BUDGET": "x"})):
        done = script(*words, **environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.exhaustive
def test_a_part_that_fails_runs_again_and_the_archive_has_what_there_is(tmp_path: Path):
    """The slow part ends with its share of the time; the parts behind it have theirs."""
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    chosen = "smoke|ops|eager|kernels|engine|generate"
    done = script("--dry-run", str(tmp_path), PYTHON=str(python), BUDGET="38", PARTS=chosen)
    assert done.returncode == 124
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {Path(name).name for name in file.getnames()}
        folder = file.getnames()[0].split("/")[0]
        again = file.extractfile(f"{folder}/smoke-again.log").read().decode()
        parts = json.load(file.extractfile(f"{folder}/summary.json"))["parts"]
    assert {"smoke.log", "ops.log", "decode-eager.log", "generate.log"} <= names
    assert again.startswith("blocking=1 ")
    assert "--no-graphs" in again
    assert {name: part["exit_code"] for name, part in parts.items()} == {
        "smoke": 3, "ops": 0, "decode-eager": 124, "tests-kernels": 0, "tests-engine": 0,
        "generate": 0,
    }  # fmt: skip
    assert sum(part["seconds"] for part in parts.values()) <= 38


@pytest.mark.parametrize("graphs", [True, False])
def test_every_command_of_a_gpu_is_one_that_sfi_takes(monkeypatch, tmp_path, graphs: bool):
    """None runs here; each is parsed, with all its settings."""
    started = []

    jobs = (bench_job, kernel_job, generate_job)
    for job in jobs:
        monkeypatch.setattr(job, "run", lambda *asked, job=job, **_: started.append((job, asked)))
    parts = [
        part
        for name, part in vars(Parts).items()
        if not name.startswith("_") and name not in ("same_tokens", "overlap")
    ]
    commands = [command for part in parts for command in part(Parts(tmp_path, dry=False, graphs=graphs))]
    for _, words in commands:
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, (words, result.output, result.exception)
    assert len(started) == len(commands)
    assert len({name for name, _ in commands}) == len(commands)
    assert {job.__name__ for job, _ in started} == {job.__name__ for job in jobs}
    for job, asked in started:
        if job is kernel_job and asked[1] is None:  # without a sweep
            KernelSettings(**{k: v for k, v in asked[0].items() if v is not None})


LOSES = """
import sys
from types import SimpleNamespace
def gone(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=gone)
sys.modules["torch"] = SimpleNamespace(cuda=cuda)
def test_a(): gone()
def test_b(): assert 1 == 2
def test_c(): pass
"""


@pytest.mark.exhaustive
def test_a_test_that_loses_the_device_ends_its_worker_and_no_other_test(tmp_path: Path):
    pytest.importorskip("xdist")
    (tmp_path / "test_loses.py").write_text(LOSES)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "tests.lost_device", "-p", "no:cacheprovider",
            "-p", "xdist", "-n", "1", "test_loses.py",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "crashed while running 'test_loses.py::test_a'" in done.stdout
    assert "test_a lost the device" in done.stderr


PLAN = dry(graphs=True)


def event(name: str, begin: float, length: float) -> dict:
    return {"name": name, "ts": begin, "dur": length, "cat": "kernel"}


def test_a_timeline_tells_idle_time_and_what_ran_beside_what():
    """Main runs from 0 to 10 and from 14 to 20; the side from 8 to 12 and within the second from 15 to 17."""
    summary = summed(
        [
            event("gemm", 0, 10), event("_selector_row_kernel", 8, 4), event("gemm", 14, 6),
            event("_top_k_count_kernel", 15, 2),
        ]
    )  # fmt: skip
    assert {name: value for name, value in summary.items() if name != "top"} == {
        "nodes": 4, "span_us": 20, "added_us": 22, "busy_us": 18, "idle_us": 2, "several_at_once_us": 4,
        "side_us": 6, "side_beside_main_us": 4,
    }  # fmt: skip
    assert [(row["name"], row["calls"], row["us"]) for row in summary["top"]] == [
        ("gemm", 2, 16), ("_selector_row_kernel", 1, 4), ("_top_k_count_kernel", 1, 2),
    ]  # fmt: skip


def test_a_failure_is_noted_and_the_next_stage_runs(tmp_path):
    def broken(journal, _):
        journal.note("first", us=3.0)
        raise ValueError("no such\nkernel")

    path = tmp_path / "x.json"
    smoke_journal = journal.Journal(torch.device("cpu"), path)
    stages = {1: ("a", broken), 2: ("b", lambda journal, _: journal.note("second", right=True))}
    assert smoke_journal.run(stages, PLAN) == 1
    document = json.loads(path.read_text())
    assert document["ended"] == "whole"
    assert [stage["rows"] for stage in document["stages"]] == [
        [{"what": "first", "us": 3.0}, {"what": "stage 1", "failed": "ValueError: no such"}],
        [{"what": "second", "right": True}],
    ]


@pytest.mark.parametrize(("raised", "code"), [("lost", 1), ("interrupt", 130)])
def test_a_lost_device_or_ctrl_c_ends_the_run_and_keeps_what_there_is(tmp_path, monkeypatch, raised, code):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(journal.torch.cuda, "synchronize", synchronize)

    def stage(journal, _):
        journal.note("before", us=1.0)
        if raised == "interrupt":
            raise KeyboardInterrupt
        journal.trial("kernel", dict)

    smoke_journal = journal.Journal(torch.device("cuda"), tmp_path / "x.json")
    assert smoke_journal.run({1: ("a", stage), 2: ("b", lambda *_: pytest.fail("runs on"))}, PLAN) == code
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["ended"].endswith("in stage 1")
    assert document["stages"][0]["rows"][0] == {"what": "before", "us": 1.0}


def test_the_parts_take_ten_minutes() -> None:
    seconds = re.findall(r"^\S+ +(\d+) s$", script("--plan", name="vllm.sh").stdout, re.MULTILINE)
    assert 540 < sum(map(int, seconds)) <= 570


@pytest.mark.parametrize(("words", "told"), [((), "MODEL must be given"), (("--fast",), "option must be")])
def test_wrong_calls_end_with_one_line(words: tuple[str, ...], told: str) -> None:
    done = script(*words, name="vllm.sh")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def step(**logprobs: float) -> dict[str, float]:
    return {name.removeprefix("t"): value for name, value in logprobs.items()}


def test_differences_are_those_of_the_first_token() -> None:
    """Equal texts have none; a close second is told by its distance; a stranger is far."""
    plain = {"tokens": [[1, 2], [1, 2], [1, 2]], "logprobs": [[step(t1=-0.1), step(t2=-0.5, t3=-0.6)]] * 3}
    assert differences(plain, {"tokens": [[1, 2], [1, 3], [1, 9]]}) == [None, 0.1, 1e9]


@pytest.mark.parametrize(("token", "code"), [(2, 0), (9, 1)])
def test_table_joins_engines(token: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only points that both have; the exit code says whether tokens are equal."""
    rows = [{"context": c, "batch": 1, "tokens_per_second": 10.0, "read_ratio": 1.0} for c in (8, 9)]
    fast = rows[0] | {"tokens_per_second": 25.0, "read_ratio": 0.1}
    equal = {"tokens": [[1, 2]], "logprobs": [[step(t1=-0.1), step(t2=-0.5)]]}
    parts = {
        "equality-vllm": equal, "equality-sfi": equal | {"tokens": [[1, token]]},
        "speed-vllm": {"rows": rows}, "speed-sfi": {"rows": [fast]},
    }  # fmt: skip
    (tmp_path / "work").mkdir()
    for name, part in parts.items():
        (tmp_path / "work" / f"{name}.json").write_text(json.dumps(part))
    asked = argparse.Namespace(
        folder=tmp_path / "work", output=tmp_path, model="a/b", load_format="auto", sfi="{}", dry_run=True
    )
    assert table(asked) == code
    assert re.search(r"8 +1 +10\.0 +25\.0 +2\.50 +0\.100", capsys.readouterr().out)
    (file,) = tmp_path.glob("*dry-run-vllm.json")
    assert [row["ratio"] for row in json.loads(file.read_text())["ratios"]] == [2.5]


PIP = """#!/usr/bin/env bash
words="$*"
case "$words" in
  "-c import torch") exit 1 ;;
  *"pip index versions torch"*--index-url*) echo "Available versions: $AT_PYTORCH" ;;
  *"pip index versions torch"*) echo "Available versions: $AT_PIP" ;;
  *"pip install"*torch*) echo "${words#*version-check }" >>"$ASKED" ;;
esac
exit 0
"""
INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
CUDA, CPU = "2.14.1, 2.13.0", "2.14.1, 2.13.0+cpu"


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="install.sh sees this machine's driver")
@pytest.mark.parametrize(
    ("system", "pip", "pytorch", "options", "wanted"),
    [
        ("Linux", CPU, CPU, {}, "torch==2.13.0"),
        ("Linux", CUDA, CPU, {}, f"{INDEX} torch==2.13.0+cpu"),
        ("Linux", CUDA, "", {}, "torch==2.13.0"),
        ("Darwin", CUDA, CPU, {}, "torch==2.13.0"),
        ("Linux", CUDA, CPU, {"TORCH_SPEC": "torch==2.9.0"}, "torch==2.9.0"),
        ("Linux", CUDA, CPU, {"DRIVER": "yes"}, "torch>=2.8"),
    ],
)
def test_without_a_driver_a_cpu_build_is_taken_where_an_index_has_one(tmp_path, system, pip, pytorch, options, wanted):
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in {
        folder / "python": PIP,
        tmp_path / "uname": f"#!/bin/sh\necho {system}\n",
        tmp_path / "nvidia-smi": f"#!/bin/sh\nexit {int('DRIVER' not in options)}\n",
    }.items():
        name.write_text(text)
        name.chmod(0o755)
    done = subprocess.run(
        ["/usr/bin/env", "bash", str(ROOT / "install.sh"), str(tmp_path / "venv")],
        env={k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "EXTRAS"))} | options | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "AT_PIP": pip, "AT_PYTORCH": pytorch,
            "ASKED": str(tmp_path / "asked"),
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (tmp_path / "asked").read_text().splitlines()[0] == wanted
    assert ("gives none" in done.stderr) == (system == "Linux" and pip == CUDA and not pytorch)
