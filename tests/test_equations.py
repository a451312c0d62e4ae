"""Each equation of the paper has exactly one home: a docstring whose first line cites it, as `(Eqs. 17-18)`."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["sfi_core", "kernels/sfi_kernels"]
CITED = re.compile(r"\(Eqs?\. ([\d\-, and]+)\)")
ALGORITHM = re.compile(r"\(Algorithm (\d)\b")
NO_HOME = {13, 14, 16}  # the derivation, written down by tests only
TABLE_ROW = re.compile(r"^\| ([\d\-, and]+) \| (.+) \| `(.+?)` \| (.+) \|$", re.MULTILINE)


def numbers(citation: str) -> set[int]:
    """Read `1 and 25` as {1, 25} and `6-8` as {6, 7, 8}."""
    equations: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", citation):
        equations |= set(range(int(first), int(last or first) + 1))
    return equations


@cache
def first_lines() -> dict[str, str]:
    """Map `file:function` to the first line of its docstring."""
    lines = {}
    for path in (path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                lines[f"{path.relative_to(ROOT).as_posix()}:{node.name}"] = doc.splitlines()[0]
    return lines


def homes() -> dict[int, list[str]]:
    places = defaultdict(list)
    for place, line in first_lines().items():
        for number in set().union(*map(numbers, CITED.findall(line))):
            places[number].append(place)
    return places


def test_no_equation_has_two_homes():
    assert {number: places for number, places in homes().items() if len(places) > 1} == {}


def test_every_equation_has_a_home():
    assert sorted(set(range(1, 26)) - NO_HOME - set(homes())) == []


def test_only_tests_write_down_the_derivation():
    """Eqs. 13, 14 and 16 lead to Eq. 15 and are evaluated nowhere else."""
    assert NO_HOME & set(homes()) == set()


@pytest.mark.parametrize(("algorithm", "package"), [("1", "sfi_core"), ("2", "kernels")])
def test_each_algorithm_has_one_home(algorithm: str, package: str):
    """A policy may cite the Selector it calls; the formula is in the kernels."""
    cited = [
        place
        for place, line in first_lines().items()
        if place.startswith(package) and algorithm in ALGORITHM.findall(line)
    ]
    assert len(cited) == 1, cited


def test_the_table_in_the_docs_names_every_home():
    text = (ROOT / "docs/equations.md").read_text()
    listed = {
        number: sorted(f"{file}:{name.split('.')[-1]}" for name in re.findall(r"`(.+?)`", function))
        for citation, function, file, _ in TABLE_ROW.findall(text)
        for number in numbers(citation)
        if number not in NO_HOME
    }
    assert listed == {number: sorted(places) for number, places in homes().items()}


def test_the_table_in_the_docs_names_tests_that_exist():
    rows = TABLE_ROW.findall((ROOT / "docs/equations.md").read_text())
    assert rows
    for citation, _, _, tests in rows:
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests):
            path = ROOT / file
            assert path.exists(), f"Eq. {citation}: {file}"
            assert not name or f"def {name}(" in path.read_text(), f"Eq. {citation}: {file}::{name}"


def test_the_other_papers_tables_name_functions_and_tests_that_exist():
    """Rows of FreeKV's and SyncKV's formulas: formula, function, file, test."""
    text = (ROOT / "docs/equations.md").read_text()
    rows = re.findall(r"^\| ((?:FreeKV|SyncKV),.+?) \| (.+?) \| `(.+?)` \| (.+?) \|$", text, re.MULTILINE)
    assert len(rows) > len(TABLE_ROW.findall(text)) // 2
    for formula, functions, file, tests in rows:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`(.+?)`", functions):
            last = name.split(".")[-1]
            assert re.search(rf"(def|class) {last}\b|^    {last}:", source, re.MULTILINE), (formula, name)
        for path, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", tests):
            assert not name or f"def {name}(" in (ROOT / path).read_text(), (formula, name)
            assert (ROOT / path).exists(), (formula, path)
