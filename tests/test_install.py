"""Which PyTorch install.sh asks pip for, with a stand-in for Python that writes down what it is asked."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.test_layers import ROOT

STUB = """#!/usr/bin/env bash
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
def test_without_a_driver_a_cpu_build_is_taken_where_an_index_has_one(
    tmp_path: Path, system: str, pip: str, pytorch: str, options: dict[str, str], wanted: str
):
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in {
        folder / "python": STUB,
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
