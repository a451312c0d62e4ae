"""What may import what: the packages, the rooms of the core, and who owns a third-party package."""

import ast
import os
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GenerationMixin, PreTrainedConfig

import sfi_core

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "sfi_kernels": set(),
    "sfi_core": {"sfi_kernels"},
    "sfi_traces": {"sfi_core"},
    "sfi_cli": {"sfi_traces", "sfi_core", "sfi_kernels"},
}
FOLDER = {"sfi_kernels": "kernels/sfi_kernels", "sfi_traces": "traces/sfi_traces"}
# the rooms of a package: each imports only from rows below its own
CORE = (
    {"measure"},
    {"bundled"},
    {"generation"},
    {"hosts"},
    {"sizes"},
    {"engine"},
    {"policies"},
    {"triggers", "models"},
    {"distributed", "settings"},
    {"observers", "state", "machine"},
    {"errors"},
)
TRACES = (
    {"tune"},
    {"replay", "results"},
    {"figures", "report"},
    {"views", "summary"},
    {"health", "export", "importing"},
    {"model", "record"},
    {"schema", "overlap"},
)
NO_MODELS = {"engine", "policies", "triggers", "state"}  # they know no checkpoint and no host
AT_ROOT = {"sfi_core": 2, "sfi_cli": 6, "sfi_traces": 4}
LONGEST_CHAIN = 23
# third-party packages that only these files may import
ONLY_IN = {
    "triton": ("kernels/sfi_kernels/",),
    "numba": ("kernels/sfi_kernels/",),
    "llvmlite": ("kernels/sfi_kernels/",),
    "transformers": ("sfi_core/hosts/transformers/", "sfi_core/models/",
        "sfi_core/generation/sampling.py", "sfi_core/measure/bench/", "sfi_core/bundled/"),
    "huggingface_hub": ("sfi_core/models/", "sfi_core/measure/bench/architectures.py"),
    "tokenizers": ("sfi_core/bundled/", "sfi_core/models/gguf_tokenizer.py"),
    "gguf": ("sfi_core/models/gguf_",),
    "vllm": ("sfi_core/hosts/vllm/",),
    "pyarrow": ("traces/",),
    "duckdb": ("traces/",),
    "nvtx": ("traces/",),
    "pydantic": ("traces/", "sfi_core/hosts/vllm/", "sfi_core/policies/built_in/synckv.py"),
    "matplotlib": ("traces/",),
    "plotly": ("traces/",),
    "optuna": ("traces/",),
    "lm_eval": ("sfi_core/measure/evaluation/",),
    "rich": ("sfi_cli/",),
    "textual": ("sfi_cli/commands/trace/replay/",),
    "typer": ("sfi_cli/",),
    "click": (),
}  # fmt: skip


def modules() -> dict[str, Path]:
    paths = {}
    for package in MAY_IMPORT:
        folder = ROOT / FOLDER.get(package, package)
        for path in sources(package):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def graph() -> dict[str, set[str]]:
    """Map each module to those it imports; imports in functions and for type checkers count."""
    known, imports = modules(), {}
    for module, path in known.items():
        names = set()
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} must not import by a relative name"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (full & known.keys()) or {node.module}
        imports[module] = (names & known.keys()) - {module}
    return imports


def room(module: str) -> str:
    return module.split(".")[1]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / FOLDER.get(package, package)).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """List the top-level packages that a file imports, at the top or inside a function."""
    nodes = nodes_of(path)
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.split(".")[0] for name in names}


def run_fresh(script: str) -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "traces"))
    environment = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package: str):
    for path in sources(package):
        upward = (imported(path) & set(MAY_IMPORT)) - MAY_IMPORT[package] - {package}
        assert not upward, f"{path.relative_to(ROOT)} must not import {upward}"


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions and under TYPE_CHECKING count: they hide a circle, they do not break it."""
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(("package", "rooms"), [("sfi_core", CORE), ("sfi_traces", TRACES)])
def test_rooms_import_only_from_rows_below(package: str, rooms: tuple[set[str], ...]):
    row = {name: number for number, names in enumerate(rooms) for name in names}
    for module, names in graph().items():
        for name in names:
            if not (module.startswith(f"{package}.") and name.startswith(package)):
                continue
            assert name != package, f"{module} must not import the package's public names"
            down = room(module) == room(name) or row[room(module)] < row[room(name)]
            assert down, f"{module} must not import {name}"


@pytest.mark.parametrize("name", sorted(NO_MODELS))
def test_what_a_host_drives_knows_neither_host_nor_checkpoint(name: str):
    """A second host, vLLM for one, brings its own model and cache."""
    paths = sorted((ROOT / "sfi_core" / name).rglob("*.py"))
    assert paths
    for path in [*paths, *sources("sfi_kernels")]:
        assert not imported(path) & {"transformers", "vllm"}, path
        text = path.read_text()
        assert "sfi_core.hosts" not in text, path
        assert "sfi_core.models" not in text, path


def test_what_any_server_needs_knows_no_server():
    """`hosts/serving` stays what it is when vLLM changes, and serves another engine as well."""
    served = {name: names for name, names in graph().items() if name.startswith("sfi_core.hosts.serving")}
    assert "sfi_core.hosts.serving.worker" in served
    for module, names in served.items():
        assert not {name for name in names if name.startswith("sfi_core.hosts.")} - served.keys(), module


def test_imports_of_the_core_do_not_run_deep():
    depth: dict[str, int] = {}
    for module in TopologicalSorter(graph()).static_order():
        below = [depth[name] for name in graph()[module] if name.startswith("sfi_core.")]
        depth[module] = 1 + max(below, default=0)
    assert max(depth[module] for module in depth if module.startswith("sfi_core.")) <= LONGEST_CHAIN


@pytest.mark.parametrize("package", AT_ROOT)
def test_a_package_s_root_stays_small(package: str):
    files = list((ROOT / FOLDER.get(package, package)).glob("*.py"))
    names = {path.name for path in files} - {"__main__.py"}
    assert len(names) <= AT_ROOT[package], sorted(names)


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


def test_the_public_names_are_where_they_were():
    names = {
        "Result", "Sampling", "SelectorConfig", "Session", "SfiConfig", "generate", "load",
        "slow_fast",
    }  # fmt: skip
    assert names <= set(sfi_core.__all__), names - set(sfi_core.__all__)
    assert all(getattr(sfi_core, name).__module__.startswith("sfi_core.") for name in names)
    assert sfi_core.__version__
    assert hasattr(transformers, "AutoModelForCausalLM"), transformers
    assert "sfi_core" not in str(transformers.__file__)


PRIVATE = "sfi_core/machine/private.py"
COMPILED = import_module("numba").njit(lambda: None) if find_spec("numba") else None
CACHED = import_module("numba.core.caching").FunctionCache(sources) if find_spec("numba") else None
LLVMLITE = import_module("llvmlite.binding.ffi").lib if find_spec("numba") else None
# what has a name, and the one file that uses it, which says why no public name does
LISTED = {
    "_attn_implementation": (PreTrainedConfig, PRIVATE),
    "_forward_hooks": (torch.nn.Module(), PRIVATE),
    "_forward_pre_hooks": (torch.nn.Module(), PRIVATE),
    "_is_mkldnn_bf16_supported": (torch.ops.mkldnn, PRIVATE),
    "_is_mkldnn_fp16_supported": (torch.ops.mkldnn, PRIVATE),
    "_python_dispatch": (torch.utils, PRIVATE),
    "_sample": (GenerationMixin, "sfi_core/hosts/transformers/slow_fast.py"),  # the loop of `model.generate`
    # sfi_kernels cannot import sfi_core
    "_cache": (COMPILED, "kernels/sfi_kernels/compiled.py"),
    "_cache_file": (CACHED, "kernels/sfi_kernels/compiled.py"),
    "_fntab": (LLVMLITE, "kernels/sfi_kernels/compiled.py"),
    "_scaled_dot_product_flash_attention_for_cpu": (torch.ops.aten, "kernels/sfi_kernels/partial_attention.py"),
}
DOCUMENTED = {"_exit", "_replace"}  # os._exit, and that of named tuples


def used_names(node: ast.AST) -> list[str]:
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


def private_names(path: Path):
    """List the private names that a file uses and does not define."""
    nodes = nodes_of(path)
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_own(node)}
    for name in (name for node in nodes for name in used_names(node)):
        if name.startswith("_") and not name.endswith("__") and name not in defined | DOCUMENTED:
            yield name


def is_own(node: ast.Attribute) -> bool:
    of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return of_self and isinstance(node.ctx, ast.Store)


def test_every_private_name_is_listed():
    uses = {
        (name, path.relative_to(ROOT).as_posix())
        for package in MAY_IMPORT
        for path in sources(package)
        for name in private_names(path)
    }
    assert uses == {(name, where) for name, (_, where) in LISTED.items()}


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
