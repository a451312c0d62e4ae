"""Other packages' private names that the product uses: all are listed here, and all still exist."""

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, PreTrainedConfig

from tests.test_layers import MAY_IMPORT, ROOT, sources

PRIVATE = "sfi_core/machine/private.py"
COMPILED = import_module("numba").njit(lambda: None) if find_spec("numba") else None
CACHED = import_module("numba.core.caching").FunctionCache(sources) if find_spec("numba") else None
# what has a name, and the one file that uses it, which says why no public name does
LISTED: dict[str, tuple[Any, str]] = {
    "_attn_implementation": (PreTrainedConfig, PRIVATE),
    "_forward_hooks": (torch.nn.Module(), PRIVATE),
    "_forward_pre_hooks": (torch.nn.Module(), PRIVATE),
    "_is_mkldnn_bf16_supported": (torch.ops.mkldnn, PRIVATE),
    "_is_mkldnn_fp16_supported": (torch.ops.mkldnn, PRIVATE),
    "_python_dispatch": (torch.utils, PRIVATE),
    "_sample": (GenerationMixin, "sfi_core/hosts/transformers/custom_generate.py"),  # the loop of `model.generate`
    # sfi_kernels cannot import sfi_core
    "_cache": (COMPILED, "kernels/sfi_kernels/compiled.py"),
    "_cache_file": (CACHED, "kernels/sfi_kernels/compiled.py"),
    "_scaled_dot_product_flash_attention_for_cpu": (torch.ops.aten, "kernels/sfi_kernels/partial_attention.py"),
}
DOCUMENTED = {"_exit", "_replace"}  # os._exit, and that of named tuples


def used_names(node: ast.AST) -> list[str]:
    """List the names of others that a piece of syntax uses."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return []
        case ast.Attribute(attr=name):
            return [name]
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]):
            return [str(name)]
        case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] not in MAY_IMPORT:
            return [*module.split("."), *(alias.name for alias in names)]
        case ast.Import(names=names):
            return [part for alias in names for part in alias.name.split(".")]
    return []


def private_names(path: Path) -> Iterator[str]:
    """List the private names that a file uses and does not define."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_own(node)}
    for name in (name for node in nodes for name in used_names(node)):
        if name.startswith("_") and not name.endswith("__") and name not in own | DOCUMENTED:
            yield name


def is_own(node: ast.Attribute) -> bool:
    """Say whether this sets an attribute of `self`."""
    of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return of_self and isinstance(node.ctx, ast.Store)


def test_every_private_name_is_listed():
    found = {
        (name, path.relative_to(ROOT).as_posix())
        for package in MAY_IMPORT
        for path in sources(package)
        for name in private_names(path)
    }
    assert found == {(name, where) for name, (_, where) in LISTED.items()}


@pytest.mark.parametrize(
    "line",
    [
        "config._hidden", "a.b()._hidden", "getattr(x, '_hidden', 0)", "from torch._hidden import y",
        "from torch import _hidden", "import torch._hidden as y",
    ],
)  # fmt: skip
def test_a_private_name_is_found_wherever_it_is_used(tmp_path: Path, line: str):
    path = tmp_path / "module.py"
    path.write_text(f"class Own:\n    def _f(self): return self._g\nOwn()._f()\n{line}\n")
    assert list(private_names(path)) == ["_hidden"]


@pytest.mark.seam
@pytest.mark.parametrize("name", LISTED)
def test_a_private_name_still_exists(name: str):
    if LISTED[name][0] is None:
        pytest.skip("its package is not installed")
    assert hasattr(LISTED[name][0], name)
