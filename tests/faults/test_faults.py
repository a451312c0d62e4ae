"""Every command that writes, under every fault: one line, no half file, and an old output that stays whole."""

import contextlib
import itertools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from sfi_cli.app import app
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from sfi_traces.results.store import ResultsFolder
from tests.faults.child import WRITERS, start, words
from tests.traces.imports import write_npz
from tests.traces.made import make_trace

FAULTS = ("full", "read-only", "clock", "two writers", "pipe")
SLOW = {"bench", "eval", "generate", "kernel-bench", "trace plot", "trace record", "tune heads"}  # not in `make test`
KILLED = ("trace record", "eval", "tune", "generate", "trace import", "trace export")
FEW = 6
KILLS = int(os.environ.get("SFI_KILLS", FEW))
FOLDERS = {"generate", "trace record", "trace import"}  # whose output is a trace
FULL = 20_000  # bytes
CODES = {0, 1, 2, 3, 4, 130}


@pytest.fixture(scope="module")
def forks():
    with start() as process:
        yield process
        process.stdin.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_trace(folder / "run", steps=24, policy="full-kv")
    write_npz(folder / "in.npz")
    return folder


@contextlib.contextmanager
def disk(place: Path, size: int | None):
    """A small or a read-only disk at `place`, where this machine lets us mount one; says whether it did."""
    flags = f"size={size}" if size else "ro,size=1m"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", flags, "tmpfs", place], capture_output=True, check=False)  # noqa: S607
    if done.returncode and size is None:
        place.chmod(0o555)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", place], check=True)  # noqa: S607
        else:
            place.chmod(0o755)


def run(
    forks, inputs: Path, place: Path, command: str, fault: str = "", writers: int = 1, options: tuple[str, ...] = (),
    **more,
) -> dict:  # fmt: skip
    folder = place.parent
    cases = [
        {
            "words": [*words(command, place / "out", inputs), *options], "place": str(folder), "fault": fault,
            "stdout": str(folder / f"stdout{n}"), "stderr": str(folder / f"stderr{n}"), **more,
        }
        for n in range(writers)
    ]  # fmt: skip
    forks.stdin.write(json.dumps(cases) + "\n")
    forks.stdin.flush()
    ended = json.loads(forks.stdout.readline())
    ended["stderr"] = [(folder / f"stderr{n}").read_text() for n in range(writers)]
    return ended


def sound(command: str, place: Path, *, killed: bool = False) -> None:
    """Check that whatever lies there is whole."""
    for path in place.rglob("*"):
        assert killed or not path.name.endswith((".tmp", ".lock")), path
        if path.suffix == ".json" and path.name[0] != ".":
            json.loads(path.read_text())
        elif path.suffix in (".html", ".png") and path.name[0] != ".":
            assert path.read_bytes().rstrip().endswith((b"</html>", b"IEND\xaeB`\x82")), path
    out = place / "out"
    if command in FOLDERS and (out / "manifest.json").exists():
        assert not check(Trace.open(out))["problems"]
    if command == "eval" and (out / "manifest.json").exists():
        results = ResultsFolder.resume(out)
        assert results.damaged == [] or killed
        results.leave()


def ended_well(ended: dict) -> None:
    for code, stderr in zip(ended["codes"], ended["stderr"], strict=True):
        assert code in CODES, (code, stderr[-2000:])
        assert "Traceback" not in stderr
        errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == (code in (1, 2, 3, 4)) or (code == 1 and not errors), stderr


def test_the_table_has_every_command_that_writes():
    """But for `serve`, which tests/vllm and `make soak` try, and `chat`, which asks a person."""

    def named(command, name: str):
        for word, subcommand in getattr(command, "commands", {}).items():
            yield from named(subcommand, f"{name} {word}".strip())
        if any({"--output", "--trace", "--plot"} & set(option.opts) for option in command.params):
            yield name

    assert set(named(get_command(app), "")) - {"serve", "chat"} == WRITERS.keys()


def pairs():
    for place, (command, fault) in enumerate(itertools.product(sorted(WRITERS), FAULTS)):
        number, column = divmod(place, len(FAULTS))
        few = column == number % len(FAULTS) and command not in SLOW
        if few or KILLS > FEW:
            yield pytest.param(command, fault, id=f"{command}-{fault}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("command", "fault"), list(pairs()))
def test_a_fault_ends_in_one_line_and_leaves_nothing_half(forks, inputs, tmp_path, command, fault):
    place = tmp_path / "place"
    place.mkdir()
    if fault == "full":
        with disk(place, FULL) as mounted:
            more = {} if mounted else {"fault": "quota", "bytes": FULL // 4}
            ended = run(forks, inputs, place, command, **more)
            ended_well(ended)
            sound(command, place)
    elif fault == "read-only":
        with disk(place, None) as mounted:
            ended = run(forks, inputs, place, command)
            ended_well(ended)
            assert ended["codes"] != [0] or not (mounted or os.geteuid())
    else:
        ended = run(forks, inputs, place, command, fault, 2 if fault == "two writers" else 1)
        ended_well(ended)
        sound(command, place)
        if fault == "clock":
            assert ended["codes"] == [0], ended
        elif fault == "two writers":
            assert 0 in ended["codes"], ended


def kills():
    for n in range(KILLS):
        marks = () if n in (2, 4) else pytest.mark.exhaustive
        yield pytest.param(KILLED[n % len(KILLED)], n, marks=marks, id=f"{KILLED[n % len(KILLED)]}-{n}")


SECONDS: dict[str, float] = {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("command", "seed"), list(kills()))
def test_a_killed_run_can_be_read_and_tried_again(forks, inputs, tmp_path, command, seed):
    place = tmp_path / "place"
    if command not in SECONDS:
        (tmp_path / "whole").mkdir()
        SECONDS[command] = run(forks, inputs, tmp_path / "whole", command)["seconds"]
    place.mkdir()
    run(forks, inputs, place, command, kill_after=SECONDS[command] * (0.1 + random.Random(seed).random()))
    sound(command, place, killed=True)
    going_on = command == "eval" and (place / "out" / "manifest.json").exists()
    again = ("--resume",) if going_on else ("--force",)
    ended = run(forks, inputs, place, command, options=again)
    assert ended["codes"] == [0], ended["stderr"]
    sound(command, place, killed=True)
