"""The names of vLLM that the plugin uses exist, and the installed version is found."""

import ast
import importlib
from pathlib import Path

import pytest

from sfi_core.hosts.vllm import plugin

FOLDER = Path(plugin.__file__).parent


def takes_from_vllm(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return any(one.split(".")[0] == "vllm" for one in found)


FILES = sorted(path.stem for path in FOLDER.glob("*.py") if takes_from_vllm(path))


@pytest.mark.parametrize("name", FILES)
def test_every_name_that_a_file_takes_from_vllm_exists(name: str):
    importlib.import_module(f"sfi_core.hosts.vllm.{name}")
    assert {"names", "backend", "server"} <= set(FILES)


def test_the_installed_version_is_found():
    assert plugin.installed_version() != "unknown"
