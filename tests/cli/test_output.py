"""What a command writes: files, devices, the terminal."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from sfi_cli import app as cli
from sfi_cli.terminal.output import Output
from sfi_core.errors import ConfigError, SfiError
from tests.cli.trace_commands import trace
from tests.traces.made import MODEL, make_trace
from tests.traces.small import write_part

ODD = "\x1b[2J\x9b31m\u202e"


def written(path, **options) -> None:
    with Output(path, quiet=True, **options) as output:
        output.text("new")


def test_a_device_and_a_fifo_are_written_to_and_not_replaced(tmp_path):
    """As root, /dev/null would go."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for path in (fifo, Path("/dev/null")):
        written(path, force=True)
        assert not path.is_file()
    assert os.read(reader, 10) == b"new"
    os.close(reader)


@pytest.mark.parametrize("kind", ["link", "dangling", "folder"])
def test_a_link_and_a_folder_are_no_output(tmp_path, kind):
    mine, path = tmp_path / "mine", tmp_path / "output"
    mine.write_text("mine")
    path.mkdir() if kind == "folder" else path.symlink_to(mine if kind == "link" else tmp_path / "none")
    with pytest.raises(ConfigError, match=r"output .* must be a file, got a (link; name the file itself|folder)"):
        written(path, force=True)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["mine/x.json", "n" * 300 + ".json"])
def test_a_name_that_cannot_be_is_one_line(tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SfiError, match=r"output .* cannot be written: (Not a directory|File name too long)"):
        written(tmp_path / name)


def test_what_a_stranger_wrote_into_a_trace_cannot_move_the_cursor(tmp_path):
    folder = make_trace(
        tmp_path / "run", policy="sfi", stopped=f"it{ODD}", backend=ODD, model=MODEL | {"name": f"m{ODD}"}
    )
    rows = parquet.read_table(folder / "steps" / "part-00000.parquet").to_pylist()
    write_part(folder, "steps", [row | {"reason": row["reason"] and ODD, "token_text": ODD} for row in rows])
    for command in (
        ("check", folder), ("show", folder), ("diff", folder, folder), ("show", folder, "--step", 1),
        ("sql", folder, "FROM steps"), ("replay", folder),
        ("export", folder, "--format", "jsonl", "--table", "steps"),
    ):  # fmt: skip
        for more in ((), ("--json",))[: 1 + (command[0] != "export")]:
            told = trace(*command, *more)
            assert told.code in (0, 3), told.stderr
            assert (told.stdout + told.stderr).replace("\n", "").isprintable(), command


def through_main(monkeypatch: pytest.MonkeyPatch, *arguments: object, encoding: str) -> tuple[int, str]:
    """Run `sfi` as the console's script does, with a stdout of an encoding; return exit code and output."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["sfi", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, stdout.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_character_that_stdout_lacks_is_escaped_as_in_json(monkeypatch, tmp_path, encoding):
    """It was a traceback, or a sound trace was called damaged."""
    folder = make_trace(tmp_path / "run", steps=12)
    query = ("trace", "sql", folder, "select 'é \N{FOX FACE}' as x")
    code, text = through_main(monkeypatch, *query, "--json", encoding=encoding)
    assert (code, json.loads(text)["rows"]) == (0, [{"x": "é \N{FOX FACE}"}])
    code, text = through_main(monkeypatch, *query, encoding=encoding)
    accent = "é" if encoding == "cp1252" else "\\u00e9"
    assert (code, f"{accent} \\ud83e\\udd8a" in text) == (0, True)


def test_an_error_that_no_file_explains_is_not_blamed_on_the_trace(monkeypatch, tmp_path):
    folder = make_trace(tmp_path / "run", steps=12)
    monkeypatch.setattr(sys, "argv", ["sfi", "trace", "show", str(folder)])
    monkeypatch.setattr("sfi_traces.model.trace.Trace.open", lambda _: "é".encode("ascii"))
    with pytest.raises(UnicodeEncodeError):
        cli.main()
