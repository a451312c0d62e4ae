"""`sfi chat`, and `--prompt-cache`: a document is read once."""

import json
import re
import shutil
from pathlib import Path

import pytest

from sfi_cli.commands import chat
from sfi_cli.commands.generate import job
from sfi_core.engine.prompt_cache import FILE
from sfi_core.models.load import BUNDLED
from tests.cli.trace_commands import sfi
from tests.small_example import PROMPT

KNOWN = re.compile(
    r"\[first token after [\d.]+ s, ([\d,]+) of ([\d,]+) tokens known; .+ tokens/s, cache read [\d.]+%\]"
)
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "model"
    shutil.copytree(BUNDLED, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(PROMPT)
    return path


def talk(model: Path, *words: object, text: str) -> tuple[str, str]:
    code, stdout, stderr = sfi("chat", "--model", model, "-n", 4, *words, text=text)
    assert code == 0, stderr
    return stdout, stderr


def test_each_question_goes_on_behind_the_last(model: Path, document: Path):
    stdout, stderr = talk(model, "-f", document, text="What is it?\nAnd\\\nthen?\n/report\n/what\n")
    known = [[int(number.replace(",", "")) for number in pair] for pair in KNOWN.findall(stderr)]
    (first, whole), (second, longer) = known
    assert whole - first == 16  # `window_prefill`
    assert first < second <= whole < longer
    assert len(stdout.splitlines()) == 2
    assert "slow steps" in stderr
    assert stderr.count(chat.HELP) == 2


def test_policies_lossless_runs_traces_and_mistakes(model: Path, tmp_path: Path):
    trace = tmp_path / "trace"
    orders = ["/policy codescan", "Hello", "/lossless", "Hello", "/policy none", "/trace"]
    orders += [f"/trace {trace}", "Hello", "/new", "Hello", "/quit", "no"]
    stdout, stderr = talk(model, text="\n".join(orders))
    assert len(stdout.splitlines()) == len(KNOWN.findall(stderr)) == 4
    assert "lossless on" in stderr
    assert "error: unknown policy 'none'" in stderr
    assert "error: /trace must name a folder, got none" in stderr
    assert sfi("trace", "check", trace)[0] == 0


def test_a_chat_is_reopened(model: Path, document: Path, tmp_path: Path):
    folder = tmp_path / "kept"
    talk(model, "-f", document, "--prompt-cache", folder, text="What is it?\n")
    assert sorted(path.name for path in folder.iterdir()) == [chat.MESSAGES, FILE]
    _, stderr = talk(model, "-f", document, "--prompt-cache", folder, text="And then?\n")
    assert "going on after 1 answers; /new begins anew" in stderr
    ((known, whole),) = KNOWN.findall(stderr)
    assert int(whole.replace(",", "")) - int(known.replace(",", "")) < 40
    assert len(json.loads((folder / chat.MESSAGES).read_text())) == 4
    (folder / chat.MESSAGES).write_text('[{"role": "user", "content": 7}]')
    (folder / FILE).write_bytes(b"damaged")
    _, stderr = talk(model, "-f", document, "--prompt-cache", folder, text="And then?\n")
    assert f"prompt cache {folder} is damaged: " in stderr
    assert "must be questions and answers in turns, got something else; a new conversation begins" in stderr


def test_an_answer_that_is_stopped_leaves_no_trace(model: Path, monkeypatch: pytest.MonkeyPatch):
    decode, calls = job.decode, []

    def stopped(*words: object, **more: object) -> object:
        calls.append(words)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return decode(*words, **more)

    monkeypatch.setattr(job, "decode", stopped)
    stdout, stderr = talk(model, text="Hello\nHello\n")
    assert "stopped" in stderr
    assert len(stdout.splitlines()) == 1
    assert calls[0][2] == calls[1][2]


def test_a_model_without_chat_is_one_line(tmp_path: Path):
    code, _, stderr = sfi("chat", text="Hello\n")
    assert (code, stderr) == (
        2,
        "error: --model must be one that chats, got the bundled one; for example --model smollm2\n",
    )
    _, stderr = talk(BUNDLED, text="Hello\n")
    assert "error: the model's tokenizer must have a chat template for --chat and messages" in stderr


def test_generate_keeps_its_prompt(document: Path, tmp_path: Path):
    folder, words = tmp_path / "kept", ("generate", "-f", document, "-n", 4, "--json", "--model", BUNDLED)
    plain = json.loads(sfi(*words)[1])["requests"][0]
    for known in (0, plain["prompt_tokens"] - 16):
        code, stdout, stderr = sfi(*words, "--prompt-cache", folder)
        request = json.loads(stdout)["requests"][0]
        assert code == 0
        assert (request["text"], request["cached_prompt_tokens"]) == (plain["text"], known)
        assert ("tokens, " in stderr and f"to {folder}" in stderr) == (known == 0)
    code, _, stderr = sfi(*words, "--prompt-cache", folder, "--dtype", "bfloat16")
    assert (code, stderr.splitlines()[-1]) == (
        2,
        "error: a prompt cache must be of this model, its dtype and its kv_dtype, got another's",
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    code, _, stderr = sfi(*words, "--prompt-cache", tmp_path / "mine")
    assert (code, "must be a folder of its own, got one with 'notes'" in stderr) == (2, True)
