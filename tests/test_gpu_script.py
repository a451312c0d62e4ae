"""benchmarks/gpu.sh without a GPU: its limits, its commands, its archive, and tests that lose a device."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.gpu_parts import Parts
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
