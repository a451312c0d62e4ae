"""`sfi chat`, and `--prompt-cache`: a document is read once."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from sfi_cli.commands import chat
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.progress import Progress
from sfi_core.engine.prompt_cache import FILE
from sfi_core.models.load import BUNDLED
from sfi_traces.model.trace import Trace
from sfi_traces.views.frames import playable
from tests.cli.screens import Terminal
from tests.cli.trace_commands import sfi, trace
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


@pytest.mark.exhaustive
def test_policies_lossless_runs_and_mistakes(model: Path):
    orders = ["/policy codescan", "Hello", "/lossless", "Hello", "/policy none", "/trace", "/save", "/quit", "no"]
    stdout, stderr = talk(model, text="\n".join(orders))
    assert len(stdout.splitlines()) == len(KNOWN.findall(stderr)) == 2
    assert "lossless on" in stderr
    assert "error: unknown policy 'none'" in stderr
    assert "error: /trace must name a folder, got none" in stderr
    assert "error: /save must name a file and come after an answer" in stderr


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


def interrupt_once(patch: pytest.MonkeyPatch, owner: type, name: str, at: int) -> None:
    """Let the `at`-th call of a method be a Ctrl-C."""
    method, calls = getattr(owner, name), []

    def interrupted(*words: object) -> None:
        calls.append(words)
        if len(calls) == at:
            raise KeyboardInterrupt
        method(*words)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("stopped", ["reading", "answering"])
def test_a_trace_has_a_request_for_each_turn(
    model: Path, document: Path, tmp_path: Path, stopped: str, monkeypatch: pytest.MonkeyPatch
):
    """Also where Ctrl-C ends an answer: the turn has the steps before it, none while its prompt was read."""
    folder = tmp_path / "trace"
    owner, name, at = (Progress, "clear", 4) if stopped == "reading" else (Output, "stream", 3)
    interrupt_once(monkeypatch, owner, name, at)
    orders = ["Hello", "/policy quest", "And then?", "/trace", "Hello"]
    _, stderr = talk(model, "-f", document, "--trace", folder, text="\n".join(orders))
    assert f"error: /policy must wait for the end of trace {folder}; /trace alone ends it" in stderr
    assert stderr.count(f"Wrote {folder}") == 1
    assert ("stopped" in stderr) == (stopped == "reading")
    run = json.loads(trace("show", folder, "--json").stdout)["run"]
    steps = {row["request"]: row["steps"] for row in run["requests"]}
    assert steps == ({1: 4} if stopped == "reading" else {0: 3, 1: 4})
    known = [int(whole.replace(",", "")) for _, whole in KNOWN.findall(stderr)]
    assert [row["prompt_tokens"] for row in run["requests"]] == known[: len(steps)]
    assert "turn 1  " in trace("show", folder).stdout
    for words in (("check", folder), ("show", folder, "--request", 1, "--step", 3)):
        assert trace(*words).code == 0
    assert trace("report", folder, "--request", 1, "-o", tmp_path / "report.html").code == 0
    assert playable(Trace.open(folder), request=1).steps.text


def test_a_saved_conversation_has_questions_and_answers(model: Path, document: Path, tmp_path: Path):
    file = tmp_path / "talk.md"
    stdout, stderr = talk(model, "-f", document, text=f"What\\\nis it?\nAnd?\n/save {file}\n/save {file}\n")
    first, second = stdout.splitlines()
    assert file.read_text() == f"> What\n> is it?\n\n{first}\n\n> And?\n\n{second}\n"
    assert f"error: output {file} exists; add --force to overwrite it" in stderr


def test_a_context_that_is_full_is_said(model: Path, tmp_path: Path):
    small = tmp_path / "small"
    shutil.copytree(model, small)
    config = json.loads((small / "config.json").read_text()) | {"max_position_embeddings": 24}
    (small / "config.json").write_text(json.dumps(config))
    stdout, stderr = talk(small, text="Hello\nHello, Belora and Falash and Eskard!\n")
    assert len(stdout.splitlines()) == 1
    assert "the context has room for 0 more tokens; /new begins anew" in stderr
    assert "error: prompt 0 and 1 new tokens must fit the model's 24 positions" in stderr


@pytest.mark.exhaustive
def test_ctrl_c_and_a_paste_on_a_terminal(model: Path, tmp_path: Path, command: list[str], environment: dict[str, str]):
    """Ctrl-C drops what is typed and stops an answer; pasted lines are one question."""
    file, folder = tmp_path / "talk.md", tmp_path / "trace"
    words = [*command, "chat", "--model", str(model), "-n", "4000", "--trace", str(folder)]
    with Terminal(words, {**environment, "XDG_STATE_HOME": str(tmp_path / "state")}) as terminal:

        def type_in(text: str, answer: str) -> None:
            terminal.wait_for("> ")
            os.write(terminal.master, text.encode())
            terminal.wait_for(answer)

        type_in("dropped", "dropped")
        time.sleep(0.5)  # until readline waits: it misses a signal that comes between a key and that
        terminal.process.send_signal(signal.SIGINT)
        type_in("\x1b[200~What\nis it?\x1b[201~\r", "is it?")
        terminal.wait_for(":::")  # what the bundled model says to that
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("[first token")
        type_in(f"/save {file}\r", "Wrote")
        type_in("\x04", f"Wrote {folder}")
        assert terminal.process.wait(30) == 0
    assert file.read_text().startswith("> What\n> is it?\n\n")
    assert (tmp_path / "state" / "sfi" / chat.HISTORY).read_text().startswith("What\nis it?\n")
    assert trace("check", folder).code == 0


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
