"""`sfi serve`: a real server process, asked over HTTP; its answers, counters and trace."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sfi_core.models.load import BUNDLED
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from tests.vllm.engines import EXAMPLE, reference

ROOT = Path(__file__).parents[2]
SETTINGS = [f"--set={name}={value}" for name, value in EXAMPLE["config"].items()]
FLAGS = [
    "--dtype=float32", "--max-model-len=8192", "--max-num-seqs=8", "--enforce-eager",
    "--max-num-batched-tokens=2048",
]  # fmt: skip
CLIENTS = 20
START = 600  # seconds


class Client:
    """Asks a server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def complete(self, prompt: str, tokens: int, **more) -> dict:
        body = {"model": "bundled", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        return self.post("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})

    def post(self, path: str, body: dict) -> dict:
        with urllib.request.urlopen(self.request(path, body)) as answer:  # noqa: S310
            return json.load(answer)

    def stream(self, path: str, body: dict) -> list[dict]:
        asked = self.request(path, body | {"stream": True})
        with urllib.request.urlopen(asked) as answer:  # noqa: S310
            lines = [line.decode().removeprefix("data: ").strip() for line in answer]
        return [json.loads(line) for line in lines if line not in ("", "[DONE]")]

    def request(self, path: str, body: dict) -> urllib.request.Request:
        url, kind = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        return urllib.request.Request(url, json.dumps(body).encode(), kind)

    def counters(self) -> dict[str, float]:
        """Read sfi's counters, and how many requests run."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        counters = {}
        for line in lines:
            name = line.partition("{")[0]
            if name.startswith(("vllm:sfi_", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")):
                counters[name.removeprefix("vllm:")] = float(line.rpartition(" ")[2])
        return counters

    def idle(self) -> None:
        """Wait until no request runs; those that clients left end with the next step."""
        for _ in range(200):
            self.complete("The", 1)
            if self.counters()["num_requests_running"] < 1:
                return
            time.sleep(0.5)
        raise AssertionError("no request must run any more")

    def settled(self, requests: float) -> dict[str, float]:
        """Wait until so many requests have ended, besides those that it asks itself, and none runs.

        vLLM reports with a step's tokens, so that an abort is counted with the next request.
        """
        for asked in range(1, 100):
            self.complete("The", 1)
            counters = self.counters()
            if counters["sfi_requests_total"] == requests + asked and counters["num_requests_running"] < 1:
                return counters
            time.sleep(0.5)
        raise AssertionError(f"{requests} requests must have ended, got {counters}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[subprocess.Popen]:
    """Start a server, whose log is in the folder; wait until it answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", "sfi_cli", "serve", f"--port={port}", *SETTINGS, *flags]
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "traces"))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": paths}
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
    started.client, end = Client(port), time.monotonic() + START
    try:
        while time.monotonic() < end and started.poll() is None:
            try:
                started.client.counters()
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                break
        else:
            pytest.fail((folder / "log").read_text()[-3000:])
        yield started
    finally:
        with suppress(ProcessLookupError):  # vLLM's processes end with it, whatever a test did
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@pytest.fixture(scope="module")
def process(folder):
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    flags = (f"--trace={folder / 'run'}", "--audit=8", "--", *FLAGS, f"--chat-template={template}")
    with serving(folder, *flags) as started:
        yield started


@pytest.fixture(scope="module")
def client(process):
    return process.client


@pytest.fixture(scope="module")
def ours():
    """Decode prompts with `sfi_core.generate`."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)

    def generate(prompts: list[str], tokens: int) -> list:
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return reference(ids, tokens, EXAMPLE["config"])

    return generate


def test_the_bundled_example_is_answered_and_reported_as_by_sfi_generate(client, ours):
    answer = client.complete(EXAMPLE["prompt"], 48)
    report, (same,) = answer["kv_transfer_params"]["sfi"], ours([EXAMPLE["prompt"]], 48)
    assert answer["choices"][0]["token_ids"] == same.token_ids
    assert report["slow_at"] == same.slow_at
    assert report["read_ratio"] == pytest.approx(same.read_ratio, abs=1e-12)
    assert report["read_ratio"] < 0.2


def test_streams_and_chats_give_the_same_text(client):
    asked = {"model": "bundled", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    prompt = EXAMPLE["prompt"][-4000:]
    whole = client.complete(prompt, 12)["choices"][0]["text"]
    pieces = client.stream("/v1/completions", asked | {"prompt": prompt})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    assert len(pieces) > 1  # a busy server joins tokens
    chat = asked | {"messages": [{"role": "user", "content": prompt}]}
    answer = client.post("/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"] == whole
    assert answer["kv_transfer_params"]["sfi"]["slow_steps"] > 0


def test_a_wrong_setting_of_a_request_is_told_in_its_answer(client):
    wrong = client.complete("The fox.", 3, vllm_xargs={"sfi.budget": 3})
    assert "sfi.budget" in wrong["kv_transfer_params"]["sfi"]["error"]
    often = client.complete(EXAMPLE["prompt"], 9, vllm_xargs={"sfi.t_max": 2})
    assert often["kv_transfer_params"]["sfi"]["slow_at"] == [0, 3, 6]


def test_twenty_clients_at_once_get_the_right_tokens_and_the_counters_add_up(client, ours):
    text = EXAMPLE["prompt"]
    prompts = [text[200 * n : 200 * n + 300 + 937 * n] for n in range(CLIENTS)]
    before = client.counters()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: client.complete(prompt, 24), prompts))
    expected = ours(prompts, 24)
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [request.token_ids for request in expected]
    after = client.counters()
    assert after["sfi_requests_total"] == before["sfi_requests_total"] + CLIENTS
    assert after["num_requests_running"] == 0
    kinds = [f"sfi_{kind}_steps_total" for kind in ("slow", "fast")]
    steps = sum(after[kind] - before[kind] for kind in kinds)
    assert steps == sum(answer["usage"]["completion_tokens"] for answer in answers)
    slow = sum(answer["kv_transfer_params"]["sfi"]["slow_steps"] for answer in answers)
    assert after["sfi_slow_steps_total"] - before["sfi_slow_steps_total"] == slow
    # twenty requests went through eight slots: none of them was lost
    assert after["sfi_dense_steps_total"] == before["sfi_dense_steps_total"]


def test_a_client_that_leaves_frees_its_slot(client, ours):
    before = client.counters()
    asked = {"model": "bundled", "prompt": "The fox.", "max_tokens": 4000, "stream": True}
    for _ in range(9):  # one more than there are slots
        connection = HTTPConnection("127.0.0.1", client.port)
        body = json.dumps(asked | {"ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read(200)
        connection.close()
    after = client.settled(before["sfi_requests_total"] + 9)
    assert after["sfi_slow_steps_total"] > before["sfi_slow_steps_total"]
    answer, (same,) = client.complete(EXAMPLE["prompt"], 24), ours([EXAMPLE["prompt"]], 24)
    assert answer["choices"][0]["token_ids"] == same.token_ids
    assert answer["kv_transfer_params"]["sfi"]["dense_steps"] == 0


def test_ctrl_c_ends_the_server_and_its_trace_is_whole(process, client, folder):
    """The last test: it ends the server."""
    ended = int(client.counters()["sfi_requests_total"])
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0, (folder / "log").read_text()[-3000:]
    trace = Trace.open(Path(folder / "run"))
    findings = check(trace)
    assert findings["problems"] == []
    assert findings["finished"]
    assert findings["steps_checked"]  # each slow step is the planner's rule on the tokens before
    assert len(findings["recorded"]) == ended
    rows = {table["table"]: table["rows"] for table in findings["tables"]}
    assert all(rows[name] for name in ("prompts", "selections", "supports", "timings"))
    assert "Wrote" in (folder / "log").read_text()
