"""Engine core and workers in processes of their own, and a process without the plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sfi_core.hosts.vllm import backend
from tests.vllm.engines import EXAMPLE, SELECTS, engine, example_ids, reference, tokens

ROOT = Path(__file__).parent.parent.parent
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def run_apart(extra: dict[str, Any] | None, environment: dict[str, str], **options: Any) -> dict[str, Any]:
    given = {"extra": extra, "options": options, "max_tokens": 48}
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "traces"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.apart", json.dumps(given)],
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # what follows is what vLLM says of its processes' end
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"tokens"'))
    report: dict[str, Any] = json.loads(line)
    return report


@pytest.fixture(scope="module")
def wanted() -> Any:
    return reference([example_ids()], 48, SELECTS)[0]


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        pytest.param({}, {"tensor_parallel_size": 2}, id="tensor-parallel"),
        pytest.param({"VLLM_CPU_CI_ENV": "1"}, {"enforce_eager": False}, id="compiled"),
    ],
)
def test_processes_give_the_same_as_generate(wanted: Any, environment, options):
    """A rank has one of the checkpoint's two KV heads: Eq. 16 looks across both."""
    assert SELECTS.get("selector") is None  # its term over heads is on
    report = run_apart(SELECTS, APART | environment, **options)
    assert report["tokens"] == list(wanted.token_ids)
    assert report["told"]["slow_at"] == list(wanted.slow_at)
    assert report["told"]["read_ratio"] == pytest.approx(wanted.read_ratio, abs=1e-12)
    assert set(report["attention"]) == {"SfiCpuImpl"}


def test_installed_but_not_configured_it_is_vllm(monkeypatch: pytest.MonkeyPatch):
    """The backend stands there; no code of ours looks at a forward pass."""

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("sfi's code is on the path of a server that did not ask for it")

    monkeypatch.setattr(backend, "Batch", reached)
    with engine() as llm:
        token_ids = tokens(llm, [EXAMPLE["prompt"]], max_tokens=48)[0]
    without = run_apart(None, {"VLLM_PLUGINS": "none"})
    assert without["attention"] == ["CPUAttentionBackendImpl"]
    assert token_ids == without["tokens"]
