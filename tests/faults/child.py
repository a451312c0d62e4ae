"""Runs commands that write, each in a process of its own that a fault meets.

A process that has imported all forks once a line of its stdin, since importing takes longer than most commands.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

SMALL = ["--max-new-tokens", "12", "--set", "budget=32", "--set", "recent=16"]
BENCH = ["--context", "200", "--steps", "3", "--repeats", "1", "--budget", "64", "--set", "recent=32"]
TEXT = "The fox runs. The dog sleeps. A bird sings, and the cat looks on. " * 6
# command: its words; RUN is a trace, IN an import, OUT what it writes
WRITERS: dict[str, list[str]] = {
    "bench": ["bench", *BENCH, "--slow-rate", "1/5", "--baseline", "none", "-o", "OUT.json", "--plot", "OUT.png"],
    "eval": [
        "eval", "--task", "bundled-recall", "--length", "128", "--samples", "2", "--method", "sfi", "--share", "0.2",
        "-o", "OUT",
    ],
    "generate": ["generate", TEXT, *SMALL, "--trace", "OUT", "--json", "-o", "OUT.json"],
    "kernel-bench": ["kernel-bench", "--op", "top_k", "--context", "300", "-o", "OUT.json"],
    "trace diff": ["trace", "diff", "RUN", "RUN", "--json", "-o", "OUT.json"],
    "trace export": ["trace", "export", "RUN", "--format", "csv", "-o", "OUT"],
    "trace import": ["trace", "import", "IN.npz", "-o", "OUT"],
    "trace plot": ["trace", "plot", "RUN", "-o", "OUT"],
    "trace record": ["trace", "record", TEXT, *SMALL, "--audit", "4", "-o", "OUT"],
    "trace replay": ["trace", "replay", "RUN", "--budget", "4,8", "--json", "-o", "OUT.json"],
    "trace report": ["trace", "report", "RUN", "-o", "OUT.html"],
    "trace show": ["trace", "show", "RUN", "--json", "-o", "OUT.json"],
    "trace sql": ["trace", "sql", "RUN", "FROM steps", "--format", "json", "-o", "OUT.json"],
    "tune": ["tune", "RUN", "--trials", "8", "-o", "OUT.toml", "--plot", "OUT.png"],
    "tune heads": ["tune", "heads", "--top-k", "8", "-o", "OUT.json"],
}  # fmt: skip


def words(command: str, out: Path, inputs: Path) -> list[str]:
    places = {"RUN": str(inputs / "run"), "IN.npz": str(inputs / "in.npz")}
    filled = [places.get(word, word) for word in WRITERS[command]]
    return [str(out) + word[3:] if word[:3] == "OUT" and word[3:4] in ("", ".") else word for word in filled]


def _begin(case: dict) -> None:
    # in the new process: where it writes what it says, and its fault
    os.chdir(case["place"])
    for number, file in ((1, case["stdout"]), (2, case["stderr"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if case["fault"] == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    elif case["fault"] == "quota":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["bytes"], case["bytes"]))
    elif case["fault"] == "clock":
        now, steps = (time.time, time.time_ns), iter(range(10**9))
        time.time = lambda: now[0]() - 3600 * next(steps)
        time.time_ns = lambda: now[1]() - 3600 * 10**9 * next(steps)


def _run(case: dict) -> None:
    from sfi_cli import app  # noqa: PLC0415 - after the fork nothing new is imported

    code = 0
    try:
        _begin(case)
        sys.argv = ["sfi", *case["words"]]
        app.main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as Python would end
        import traceback  # noqa: PLC0415

        os.write(2, traceback.format_exc().encode())
        code = 99
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code if error.errno == errno.EPIPE else 98
    os._exit(code if isinstance(code, int) else int(code is not None))


def _serve() -> None:
    # ruff: disable[F401, PLC0415] - whoever reads the table needs none of these
    import matplotlib as mpl
    import optuna

    import sfi_cli.app
    import sfi_core.generation.generate
    import sfi_core.models.load
    import sfi_traces.model.trace

    # ruff: enable[F401, PLC0415]
    mpl.use("agg")
    for line in sys.stdin:
        begun, pids = time.monotonic(), []
        for case in (cases := json.loads(line)):
            if not (pid := os.fork()):
                _run(case)
            pids.append(pid)
        if kill_after := cases[0].get("kill_after"):
            time.sleep(kill_after)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps({"codes": codes, "seconds": time.monotonic() - begun}), flush=True)  # noqa: T201


def start() -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([*(str(root / folder) for folder in (".", "kernels", "traces")), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__], env=environment, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip


if __name__ == "__main__":
    _serve()
