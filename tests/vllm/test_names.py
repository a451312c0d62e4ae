"""The names of vLLM that the plugin uses: they exist, they stand in few files, and the version is checked."""

import ast
import importlib
from pathlib import Path

import pytest

from sfi_core.hosts.vllm import names, versions

FOLDER = Path(names.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("*names.py"))


@pytest.mark.parametrize("name", FILES)
def test_every_name_that_is_listed_exists(name: str):
    """Importing the file looks up what it takes from vLLM; the list says what others may take from it."""
    module = importlib.import_module(f"sfi_core.hosts.vllm.{name}")
    assert all(hasattr(module, one) for one in module.__all__)
    assert {"names", "cpu_names"} <= set(FILES)


def test_other_files_take_vllm_s_names_from_there():
    for path in FOLDER.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        found |= {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
        if not path.stem.endswith("names"):
            assert not {one for one in found if one.split(".")[0] == "vllm"}, path


def test_the_installed_version_is_found():
    assert versions.installed_version() != "unknown"
