"""The packages import one way: sfi_cli -> sfi_traces -> sfi_core -> sfi_kernels."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "sfi_kernels": set(),
    "sfi_core": {"sfi_kernels"},
    "sfi_traces": {"sfi_core"},
    "sfi_cli": {"sfi_traces", "sfi_core", "sfi_kernels"},
}
FOLDER = {"sfi_kernels": "kernels/sfi_kernels", "sfi_traces": "traces/sfi_traces"}
# third-party packages that only these files may import
ONLY_IN = {
    "triton": ("kernels/sfi_kernels/",),
    "transformers": (
        "sfi_core/models/load.py",
        "sfi_core/hosts/transformers/attention.py",
        "sfi_core/hosts/transformers/cache.py",
        "sfi_core/hosts/transformers/shapes.py",
        "sfi_core/generation/sampling.py",
        "sfi_core/measure/bench/",
        "sfi_core/models/tensor_parallel.py",
        "sfi_core/bundled/",
    ),
    "huggingface_hub": ("sfi_core/models/", "sfi_core/measure/bench/architectures.py"),
    "tokenizers": ("sfi_core/bundled/", "sfi_core/generation/text_stream.py"),
    "pyarrow": ("traces/",),
    "duckdb": ("traces/",),
    "nvtx": ("traces/",),
    "matplotlib": ("traces/",),
    "plotly": ("traces/",),
    "optuna": ("traces/",),
    "lm_eval": ("sfi_core/measure/evaluation/",),
    "datasets": ("sfi_core/measure/evaluation/",),
    "rich": ("sfi_cli/",),
    "typer": ("sfi_cli/",),
    "click": (),
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / FOLDER.get(package, package)).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """List the top-level packages that a file imports, at the top or inside a function."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    return {name.split(".")[0] for name in names}


def run_fresh(script: str) -> None:
    """Run `script` in a new process that has imported nothing yet."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "traces"))
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package: str):
    for path in sources(package):
        upward = (imported(path) & set(MAY_IMPORT)) - MAY_IMPORT[package] - {package}
        assert not upward, f"{path.relative_to(ROOT)} must not import {upward}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_third_party_packages_stay_with_their_owners(package: str):
    for path in sources(package):
        where = path.relative_to(ROOT).as_posix()
        for name in imported(path) & set(ONLY_IN):
            assert where.startswith(ONLY_IN[name]), f"{where} must not import {name}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_the_rules_above_look_at_some_files(package: str):
    """A renamed folder must not make them pass."""
    assert sources(package)


@pytest.mark.parametrize("folder", ["kernels", "traces"])
def test_a_folder_is_not_a_package_of_its_own(folder: str):
    """Hugging Face's `kernels` is a PyPI package that transformers imports by name."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_command_line_does_not_import_torch_or_transformers():
    run_fresh(
        "import sys, sfi_cli.app\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, f'sfi_cli.app imports {heavy}'"
    )


def test_references_run_without_triton():
    """Block the import, as on a machine without Triton."""
    run_fresh("""
import sys; sys.modules["triton"] = None
from importlib import import_module
from pathlib import Path
import torch, sfi_kernels
for path in Path(sfi_kernels.__path__[0]).glob("*/reference.py"):
    import_module(f"sfi_kernels.{path.parent.name}")
from sfi_kernels.top_k import top_k
assert top_k(torch.zeros(1, 2, 8), 3).shape == (1, 2, 3)
""")
