"""What the documents say to type and where they point, and the pages of docs/cli that the parser makes."""

import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_cli.settings import COMMANDS, DIMENSIONS, SETTINGS, settings_for

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
HANDED_ON = ("lm-eval",)  # commands that hand every argument on to another program
START = re.compile(r"(?:^|&& |\| )(?:\$ )?(?:[\w.]+/)*sfi (?=[a-z])|-m sfi_cli (?=[a-z])")
# a comment, another command, or flags for another program
END = re.compile(r"\s(?:#|--\s|[|&;>]+(?:\s|$))")
# other programs' options that stand alone, vLLM's among them
OTHERS = {
    *("--environment", "--interval", "--no-deps"),
    *("--enforce-eager", "--kv-transfer-config", "--shutdown-timeout", "--attention-config"),
}
STALE = "docs/cli is stale; run make docs-cli"
LINES = 120  # of a help: two screens


@cache
def options() -> dict[str, set[str]]:
    """List the options of every command, the two everywhere included."""

    def walk(command, name=""):
        if not hasattr(command, "commands"):
            found[name] = {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
            found[name] |= {"--debug", "--help", "-h"}
        for word, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {word}".strip())

    found: dict[str, set[str]] = {}
    walk(typer.main.get_command(cli.app))
    return found


def code(text: str) -> list[str]:
    """List the lines of code, joined where they go on, and the spans of code."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    return [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).split("\n")] + spans


def mistakes(text: str) -> list[str]:
    """List what a document says to type and names in files, and what is not there."""
    found = [
        f"{path}: no {name}"
        for path, name in re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", text)
        if not any(defines(file, name) for file in sources() if f"/{file}".endswith(f"/{path}"))
    ]
    for line in code(text):
        starts = [match.end() for match in START.finditer(line)]
        for start, after in pairwise([*starts, len(line)]):
            found += of_command(END.split(line[start:after], maxsplit=1)[0])
        if re.match(r"--[a-z]", line):
            found += of_words(line, set().union(*options().values()) | OTHERS, SETTINGS)
    return found


@cache
def sources() -> list[str]:
    """List the product's files."""
    folders = ("sfi_core", "sfi_cli", "kernels", "traces")
    return [str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*.py")]


def defines(file: str, name: str) -> bool:
    """Say whether a file defines a function or class, or both a class and its method."""
    text = (ROOT / file).read_text()
    return all(re.search(rf"^ *(?:def|class) {one}\b", text, re.MULTILINE) for one in name.split("."))


def of_command(line: str) -> list[str]:
    # a command, without `sfi`
    words = line.split()
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in options()), None)
    if name is None:
        groups = {known.split()[0] for known in options()}
        return [] if words[0] in groups and len(words) == 1 else [f"sfi {line}: no such command"]
    if name in HANDED_ON:
        return []
    settings = SETTINGS if name == "config show" else settings_for(name) if name in COMMANDS else {}
    return of_words(line, options()[name], settings)


def of_words(line: str, known: set[str], settings) -> list[str]:
    # options, and the settings that --set and --search name
    try:
        words = shlex.split(line)
    except ValueError:  # prose: "the trace's"
        words = line.split()
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    wrong = [f"{line}: no {word}" for word in given if word.split("/")[0] not in known]
    for flag, assigned in pairwise(words):
        name = assigned.partition("=")[0]
        allowed = {"--set": settings, "--search": DIMENSIONS}.get(flag)
        if allowed is not None and not name.isupper() and name not in allowed:
            wrong.append(f"{line}: no setting {name}")
    return wrong


def anchors(path: Path) -> set[str]:
    """List the anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def dead_ends(path: Path) -> list[str]:
    """List a document's links without a target, and the files that it names and that are not there."""
    found = []
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    files = r"\b((?:sfi_core|sfi_cli|kernels|traces|tests|benchmarks)/[\w/.-]+\.(?:py|sh))\b"
    return found + [name for name in re.findall(files, path.read_text()) if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_names_only_what_there_is(path: Path):
    assert not mistakes(path.read_text())
    assert not dead_ends(path)


def test_the_prompt_of_the_readme_fits_the_model():
    """smollm2 has 8,192 positions; its tokens have some four bytes."""
    files = re.search(r"^cat (.+) > long.txt$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert files
    assert sum((ROOT / name).stat().st_size for name in files[1].split()) < 25_000


def test_the_committed_film_of_the_player_loads_nothing_and_is_small():
    text = (ROOT / "docs" / "player.svg").read_text(encoding="utf-8")
    assert list(ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text"))  # noqa: S314 - our own file
    assert re.findall(r"https?://[^\"' )]+", text) == ["http://www.w3.org/2000/svg"]
    assert len(text) < 300_000


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```\n$ sfi generate --trace run --audit 16  # --gone\n```", 0),
        ("```\nsfi bench --context 4K \\\n    --gone 3\n```", 1),
        ("Type `sfi trace show run --gone`.", 1),
        ("Type `sfi tracing run`.", 1),
        ("Set `--set span=4`, `--set spam=4` or `--search stride`.", 1),
        ("`sfi_core/engine/run.py: Run.begin_decode` and `run.py: Run.gone`, `gone.py: Run`", 2),
        ("`sfi eval --set span=4` has no effect, nor has `--no-such-thing`.", 2),
    ],
)
def test_what_is_not_there_is_found(text: str, wrong: int):
    assert len(mistakes(text)) == wrong


@pytest.fixture(scope="module")
def script():
    """What is in the script that makes the pages."""
    return SimpleNamespace(**run_path(str(ROOT / "docs" / "make_cli_pages.py")))


def test_the_pages_are_what_the_command_line_says(script):
    written = {path.name: path.read_text() for path in script.FOLDER.glob("*.md")}
    wanted = script.pages()
    stale = [name for name in wanted.keys() | written if wanted.get(name) != written.get(name)]
    assert not stale, STALE


def test_no_help_has_brackets_that_a_terminal_would_take_for_a_style(script):
    for name, text in script.pages().items():
        if name not in ("README.md", "settings.md"):
            assert not re.search(r"\[[a-z@#/][^\]]*\](?!\()", text), name


@pytest.mark.parametrize("command", options())
def test_a_command_s_help_fits_two_screens(command: str):
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    assert (result.exit_code, result.stdout.count("\n") <= LINES) == (0, True)
