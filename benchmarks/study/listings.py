"""Tables and source code of the standard library; technical pages and JSON of packages."""

import calendar
import errno
import html.entities
import inspect
import json
import locale
import mimetypes
import sysconfig
import unicodedata
from collections.abc import Iterator
from encodings.aliases import aliases
from importlib import import_module
from pathlib import Path

from sfi_core.errors import InputError

ROWS = 48  # lines of a piece of a table
CODE_BYTES = range(15_000, 60_000)  # sizes of source files that are neither stubs nor tables
CODE_FILES = 48
JSON_FILES = (
    "datasets/utils/resources/languages.json", "plotly/validators/_validators.json",
    "torch/_dynamo/graph_break_registry.json",
)  # fmt: skip
JSON_PIECES = 30  # of a file
MODULES = (
    "argparse", "asyncio", "collections", "csv", "datetime", "decimal", "difflib", "email.message",
    "fractions", "heapq", "http.client", "inspect", "io", "itertools", "logging", "math", "os", "pathlib",
    "random", "re", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile",
    "textwrap", "threading", "typing", "unittest", "urllib.parse", "zipfile",
)  # fmt: skip


def source_files() -> list[str]:
    """Return source files of the standard library, a document a file."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size in CODE_BYTES]
    step = max(1, len(paths) // CODE_FILES)
    return [path.read_text(encoding="utf-8") for path in paths[::step][:CODE_FILES]]


def tables() -> list[str]:
    """Return tables of the standard library in pieces of 48 lines, each with its heading."""
    return [
        f"{name}\n\n" + "\n".join(rows[start : start + ROWS])
        for name, rows in _tables()
        for start in range(0, len(rows), ROWS)
    ]


def technical() -> list[str]:
    """Return Markdown pages with tables, a document a page, and pieces of JSON files. No package ships logs.

    Raises:
        InputError: A package is not installed.
    """
    packages = Path(sysconfig.get_path("purelib"))
    if lacking := [name for name in ("lm_eval/tasks", *JSON_FILES) if not (packages / name).exists()]:
        raise InputError(f"texts of kind technical must have {lacking[0]} among the installed packages, got none")
    texts = [path.read_text(encoding="utf-8") for path in sorted(packages.glob("lm_eval/tasks/**/*.md"))]
    texts = [text for text in texts if "|--" in text or "| --" in text]
    for name in JSON_FILES:
        text = (packages / name).read_text(encoding="utf-8")
        lines = json.dumps(json.loads(text), indent=2).splitlines()[: JSON_PIECES * ROWS]
        texts += ["\n".join(lines[start : start + ROWS]) for start in range(0, len(lines), ROWS)]
    return texts


def _tables() -> Iterator[tuple[str, list[str]]]:
    yield (
        "Character entities",
        [f"&{name:<12} U+{ord(text[0]):04X}" for name, text in sorted(html.entities.html5.items())][::6],
    )
    types = sorted(mimetypes.MimeTypes(filenames=()).types_map[True].items())
    yield "File types", [f"{suffix:<10} {kind}" for suffix, kind in types]
    yield "Errors", [f"{number:>4}  {name}" for number, name in sorted(errno.errorcode.items())]
    yield "Encodings", [f"{name:<24} {codec}" for name, codec in sorted(aliases.items())]
    yield "Locales", [f"{a:<24} {b}" for a, b in sorted(locale.locale_alias.items())][::4]
    yield (
        "Characters",
        [
            f"U+{code:04X}  {unicodedata.category(chr(code))}  {unicodedata.name(chr(code))}"
            for code in range(0xA1, 0x3000, 7)
            if unicodedata.name(chr(code), "")
        ][:960],
    )
    yield (
        "Numbers",
        [
            json.dumps({"code": code, "name": unicodedata.name(chr(code)), "value": value})
            for code in range(0x3000)
            if (value := unicodedata.numeric(chr(code), None)) is not None
        ][:480],
    )
    yield ("Calendar", [line for year in range(2020, 2028) for line in _calendar(year).splitlines() if line.strip()])
    yield "Functions", [row for module in MODULES for row in _functions(module)]


def _calendar(year: int) -> str:
    return calendar.TextCalendar().formatyear(year)


def _functions(module: str) -> Iterator[str]:
    # what pydoc lists of a module: its functions, with their signatures
    for name, value in sorted(vars(import_module(module)).items()):
        if name.startswith("_") or not inspect.isroutine(value):
            continue
        try:
            signature = str(inspect.signature(value))
        except (ValueError, TypeError):  # built in, without one
            continue
        if "0x" not in signature:
            yield f"{module}.{name}{signature}"
