"""What 32K of context is for: a repository's files, and a manual of many pages, from the packages beside the study."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sfi_core.errors import InputError

MOST = 80_000  # characters of a document
REPOSITORIES = (
    "accelerate", "aiohttp", "datasets", "fsspec", "huggingface_hub", "jinja2", "mako", "markdown_it", "more_itertools",
    "optuna", "pluggy", "pydantic", "rich", "textual", "typer",
)  # fmt: skip
MANUALS = ("numpy/lib", "numpy/ma", "peft", "PIL")


def repositories() -> list[str]:
    """Return the sources of packages, a document a package: its files in order, each after its path.

    Raises:
        InputError: A package is not installed.
    """
    return ["".join(f"# {name}\n{source}\n\n" for name, source in _files(package))[:MOST] for package in REPOSITORIES]


def manuals() -> list[str]:
    """Return reference pages, a document a module: its classes and functions, each with its docstring.

    Raises:
        InputError: A package is not installed.
    """
    seen: set[str] = set()  # modules copy from each other
    pages = []
    for _, source in (file for package in MANUALS for file in _files(package)):
        fresh = [entry for entry in _entries(source) if entry not in seen]
        seen.update(fresh)
        pages.append("\n\n".join(fresh)[:MOST])
    return [page for page in pages if page]


def _files(package: str) -> Iterator[tuple[str, str]]:
    # the path, within its packages' folder, and the text of each source file that is not a test
    packages = Path(sysconfig.get_path("purelib"))
    if not (packages / package).is_dir():
        raise InputError(f"texts must have {package} among the installed packages, got none")
    for path in sorted((packages / package).rglob("*.py")):
        inner = path.relative_to(packages)
        if not {"tests", "_vendor"}.intersection(inner.parts):
            yield inner.as_posix(), path.read_text(encoding="utf-8")


def _entries(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"## {node.name}\n\n{text}"
