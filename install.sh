#!/usr/bin/env bash
# Install sfi into a virtual environment, with the PyTorch that suits this machine.
#
#   ./install.sh [FOLDER]   FOLDER: the environment, default $VENV, else .venv; used as it is if it exists
#
#   EXTRAS=all                                 extras besides what sfi needs to run: all, dev, plots,smollm2, ...
#   PYTHON=python3.12                          the interpreter of a new environment
#   TORCH_SPEC="torch==2.13.0+cpu"             another PyTorch; one that is already there always stays
#   TRANSFORMERS_SPEC="transformers==5.17.0"   another transformers
#
# Without an NVIDIA driver this also installs numba (the extra cpu), and torch==2.13.0 as a CPU build: from where pip's
# own settings lead, if that has one, else on Linux from PyTorch's index of CPU builds. Where neither has one, it is
# what pip's own index has: on Linux a CUDA build, which runs but brings gigabytes that no CPU needs.
set -euo pipefail

home=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-${VENV:-.venv}}
transformers=${TRANSFORMERS_SPEC:-transformers==5.17.0}

has_nvidia_driver() {
  nvidia-smi -L >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]
}

if [ ! -x "$venv/bin/python" ]; then
  interpreter=${PYTHON:-python3}
  if ! "$interpreter" -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
    echo "error: Python must be 3.11 or newer, got $("$interpreter" --version); set PYTHON" >&2
    exit 2
  fi
  "$interpreter" -m venv "$venv"
fi
python="$venv/bin/python"
pip_install() { "$python" -m pip install --disable-pip-version-check "$@"; }

# A build whose version says cpu: true on Linux alone, where others exist. Reads a page of an index, no package.
has_cpu_build() {
  "$python" -m pip index versions torch --disable-pip-version-check "$@" 2>/dev/null | grep -qF "$cpu_build"
}

# PyTorch first and apart: which build is right depends on the machine, and no dependency can say that.
cpu_build="2.13.0+cpu"
cpu_index=https://download.pytorch.org/whl/cpu
if ! "$python" -c "import torch" 2>/dev/null; then
  if [ -n "${TORCH_SPEC:-}" ]; then
    pip_install "$TORCH_SPEC"
  elif has_nvidia_driver; then
    pip_install "torch>=2.8"
  elif [ "$(uname -s)" != Linux ] || has_cpu_build; then
    pip_install "torch==2.13.0"
  elif has_cpu_build --index-url "$cpu_index" --timeout 5 --retries 0; then
    pip_install --extra-index-url "$cpu_index" "torch==$cpu_build"
  else
    echo "PyTorch's index of CPU builds ($cpu_index) gives none; taking the build of pip's own index" >&2
    pip_install "torch==2.13.0"
  fi
fi

# What follows must not replace that build.
constraints="$venv/constraints.txt"
"$python" -c "from importlib.metadata import version; print(f\"torch=={version('torch')}\")" >"$constraints"
extras=${EXTRAS:-}
echo "Installing sfi${extras:+ with $extras} and $transformers"
pip_install -qq --constraint "$constraints" --editable "$home${extras:+[$extras]}" "$transformers"

# On a CPU numba compiles what codescan and quest do at every step. Without it they run in PyTorch, slower.
if ! has_nvidia_driver && ! pip_install -qq --constraint "$constraints" --editable "$home[cpu]"; then
  echo "numba does not fit this Python or numpy; codescan and quest run in PyTorch, slower" >&2
fi

# The interpreter of Triton 3.6 and older, which runs kernels without a GPU, fails with numpy 2.4. Only tests
# need it, and newer Triton is fine, so this is no upper bound in pyproject.toml.
if [[ ",$extras," == *,dev,* ]] && "$python" - <<'END' 2>/dev/null; then
import importlib.metadata
import sys

major, minor, *_ = importlib.metadata.version("triton").split(".")
sys.exit((int(major), int(minor)) > (3, 6))
END
  pip_install -qq --constraint "$constraints" "numpy<2.4"
fi

"$python" - <<'END'
from importlib.metadata import version

import torch

device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(f"sfi {version('sfi-toolkit')}, transformers {version('transformers')}, torch {torch.__version__} on {device}")
END
if [ -z "$extras" ]; then echo "Next: $venv/bin/sfi generate"; fi
