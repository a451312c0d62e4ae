"""`make soak`: a server under 2,000 requests, with clients that leave, wrong settings and wrong bodies."""

import json
import os
import random
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.vllm.engines import EXAMPLE
from tests.vllm.test_serve import FLAGS, Client, serving

pytestmark = pytest.mark.skipif("SFI_SOAK" not in os.environ, reason="minutes; make soak runs it")
REQUESTS, CLIENTS, SLOTS = int(os.environ.get("SFI_SOAK", "2000")), 12, 8
FIRST = REQUESTS // 2  # by then vLLM has touched all of its KV cache
GROWTH = 1.05  # of memory in the second half: at most 5 %
ODD = [10**400, -1, 1.5, "x" * 5000, "\x1b[2J\u202e", [1, 2], 2**63, 0, "nan", "always"]
NAMES = ["t_max", "min_gap", "stride", "slow_start", "enabled", "budget", "trigger_policy", "\x9b", "n" * 3000]


def left(client: Client, body: dict, rng: random.Random) -> None:
    """Ask for a stream, and go away before or while it comes."""
    connection = HTTPConnection("127.0.0.1", client.port)
    asked = json.dumps(body | {"stream": True, "max_tokens": 400, "ignore_eos": True})
    connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    if rng.random() < 0.7:
        connection.getresponse().read(rng.choice([1, 200, 2000]))
    connection.close()


def one(client: Client, number: int) -> str:
    """Send one request; return what became of it."""
    rng, text = random.Random(number), EXAMPLE["prompt"]
    begin = rng.randrange(len(text) // 2)
    body = {"model": "bundled", "prompt": text[begin : begin + rng.randrange(20, 3000)], "temperature": 0}
    kind = rng.choices(["answered", "left", "settings", "refused"], [5, 3, 3, 1])[0]
    if kind == "left":
        left(client, body, rng)
        return kind
    if kind == "settings":
        body["vllm_xargs"] = {f"sfi.{rng.choice(NAMES)}": rng.choice(ODD)}
    elif kind == "refused":
        body |= rng.choice([{"max_tokens": -1}, {"prompt": []}, {"temperature": "hot"}, {"prompt": "x " * 50_000}])
    try:
        answer = client.post("/v1/completions", body | {"max_tokens": rng.randrange(1, 24), **body})
    except urllib.error.HTTPError as error:
        return "refused" if error.code < 500 else f"broken: {error.code}"
    assert len(json.dumps(answer["kv_transfer_params"])) < 4000
    return "settings" if "error" in answer["kv_transfer_params"]["sfi"] else "answered"


def resources(group: int) -> dict[str, int]:
    """Count threads, open files and resident bytes of the processes of a group."""
    counts = {"threads": 0, "files": 0, "bytes": 0}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getpgid(int(process.name)) != group:
                continue
            counts["threads"] += len(list((process / "task").iterdir()))
            counts["files"] += len(list((process / "fd").iterdir()))
            counts["bytes"] += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return counts


def test_thousands_of_requests_leave_nothing_behind(tmp_path):
    became: dict[str, int] = {}
    with serving(tmp_path, f"--slots={SLOTS}", "--", *FLAGS) as server, ThreadPoolExecutor(CLIENTS) as pool:
        client, taken = server.client, {}
        for begin, end in ((0, FIRST), (FIRST, REQUESTS)):
            for kind in pool.map(lambda number: one(client, number), range(begin, end)):
                became[kind] = became.get(kind, 0) + 1
            client.idle()
            taken[end] = resources(server.pid)
        answers = list(pool.map(lambda n: client.complete(EXAMPLE["prompt"][n * 50 : 4000], 24), range(SLOTS)))
        counters = client.counters()
    print(json.dumps({"became": became, "resources": taken, "counters": counters}))  # noqa: T201 - what make soak says
    assert became.keys() <= {"answered", "left", "settings", "refused"}
    assert {answer["kv_transfer_params"]["sfi"]["dense_steps"] for answer in answers} == {0}  # every slot is free
    assert counters["kv_cache_usage_perc"] == 0
    assert counters["num_requests_running"] == 0
    for what, most in (("threads", 1), ("files", 1), ("bytes", GROWTH)):
        assert taken[REQUESTS][what] <= taken[FIRST][what] * most, (what, taken)
