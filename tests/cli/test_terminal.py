"""What a command writes to files and devices, and on a terminal: text beside bars and messages, tables of its width."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet
from rich.cells import cell_len

import sfi_core
from sfi_cli import app as cli
from sfi_cli.commands.bench.views import bench_text
from sfi_cli.commands.kernel_bench import group_text
from sfi_cli.commands.trace.replay.views import replay_text
from sfi_cli.commands.trace.show import step_text
from sfi_cli.commands.trace.show_views import full_text, show_text
from sfi_cli.terminal import output, progress
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.progress import Progress, ProgressObserver
from sfi_cli.terminal.tables import rendered
from sfi_core import SfiConfig
from sfi_core.errors import ConfigError, SfiError
from sfi_core.generation.prompts import TextStream
from sfi_traces.views.table import Table
from tests.cli.screens import drawn, on_a_terminal
from tests.cli.trace_commands import sfi, trace
from tests.core.conftest import tiny_qwen3
from tests.traces.made import MODEL, make_trace
from tests.traces.small import fixed_folder, write_part

PROMPT = (
    "Later, Belora hid a red lantern under the old bridge.\nQuestion: What is written about Belora?\nAnswer: Belora"
)
ANSWER = " hid a red lantern under the old bridge."
ODD = "\x1b[2J\x9b31m\u202e"
WIDTHS = (80, 100, 140)
CONFIG = SfiConfig(sink=2, recent=6, budget=5, trigger_token_ids=(1,))


def test_no_bar_and_no_message_is_drawn_over_the_answer():
    """The bar of the comparison's prompt comes after the streamed text; it once erased the last line."""
    code, lines, shown = on_a_terminal(80, "generate", PROMPT, "-n", "24", "--compare")
    assert code == 0
    assert shown.index("loading bundled") < shown.index(ANSWER[:9])  # not a blank screen until the model is there
    (answer,) = [line for line in lines if ANSWER in line]
    assert answer.strip() == ANSWER.strip()
    assert not [line for line in lines if "reading the prompt" in line or "loading" in line]
    assert [line for line in lines if line.startswith("same tokens  ")]
    assert max(map(len, lines)) <= 80
    assert "settings     preset default" in lines


def test_an_interrupted_stream_ends_its_line_before_a_message(monkeypatch, tmp_path):
    push, tokens = TextStream.push, []

    def stopped(self, token):
        tokens.append(token)
        if len(tokens) == 3:
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", stopped)
    ended = trace("record", PROMPT, "-o", tmp_path / "run")
    assert (ended.code, ended.stdout) == (130, " hid a\n")
    assert ended.stderr.startswith(f"Wrote {tmp_path}")


def test_a_reader_of_a_pipe_gets_a_line_at_most_every_ten_seconds(monkeypatch, capsys):
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with Progress(quiet=False) as shown:
        for done in range(12):  # 36 seconds, and more for each line's own look at the clock
            shown.update("measuring", done, 12)
    assert 2 <= capsys.readouterr().err.count("measuring") <= 4


@pytest.mark.exhaustive
def test_a_closed_pipe_ends_a_command_without_a_word(command, environment, tmp_path):
    folder = make_trace(tmp_path / "run", steps=200)
    words = [*command, "trace", "export", str(folder), "--format", "perfetto"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(20).startswith(b'{"displayTimeUnit"')
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, b"")


def test_a_timeline_does_not_go_to_a_terminal(tmp_path):
    folder = make_trace(tmp_path / "run", steps=4)
    code, lines, _ = on_a_terminal(140, "trace", "export", folder, "--format", "perfetto")
    assert (code, [line for line in lines if line]) == (0, [f"Wrote {folder}-timeline.json.gz"])


FRONT = Table(
    "Front", ("policy", "tokens/s", "accepted a verification", "p95", "x"),
    [("sfi, a method with a long name", "1,234.5", "3.21", "0.9", "5"), ("b", "2", "-", "0.812", "500.00")],
    spare=("p95", "tokens/s"),
)  # fmt: skip
NARROW = """\
Front

                                     accepted a
  policy                           verification        x
 ────────────────────────────────────────────────────────
  sfi, a method with a long name           3.21        5
  b                                           -   500.00
  --wide also shows: tokens/s, p95
"""
NARROWER = """\
Front

                     accepted a
  policy           verification        x
 ────────────────────────────────────────
  sfi, a method…           3.21        5
  b                           -   500.00
  --wide also shows: tokens/s, p95
"""
BLOCKS = """\
Front

  policy          sfi, a
                  method
                  with a
                  long name
  tokens/s        1,234.5
  accepted a verification
                  3.21
"""


def test_a_table_folds_its_headings_then_leaves_columns_out_then_shortens_words_then_is_blocks():
    whole = rendered([FRONT])
    assert (
        whole.splitlines()[2]
        == "  policy                           tokens/s   accepted a verification     p95        x"
    )
    assert rendered([FRONT], 120) == whole
    folded = rendered([FRONT], 80).splitlines()
    assert folded[3].split() == ["policy", "tokens/s", "verification", "p95", "x"]
    assert rendered([FRONT], 60) == NARROW
    assert rendered([FRONT], 42) == NARROWER
    assert rendered([FRONT], 28).startswith(BLOCKS)


recorded = fixed_folder(steps=40, policy="sfi")


def test_what_a_trace_s_commands_print_is_no_wider_than_the_terminal(recorded, monkeypatch):
    grid = ("--t-max", "8,16", "--budget", "8,16", "--set", "span=0,2", "--trigger-set", "marks=. ? !")
    for words, views in (
        (("show", recorded), (show_text, full_text)),
        (("show", recorded, "--step", "17"), (step_text,)),
        (("replay", recorded, *grid), (replay_text,)),
    ):
        document = json.loads(trace(*words, "--json").stdout)
        for view in views:
            for width in WIDTHS:
                lines = rendered(view(document), width).splitlines()
                assert max(map(cell_len, lines)) <= width
                if view is replay_text:
                    (heads,) = [line for line in lines if "speed-up" in line]
                    assert ("worst" in heads.split()) == (width == 140)
    plain = trace("replay", recorded, *grid).stdout
    monkeypatch.setattr(output, "terminal_width", lambda _: 100)
    assert trace("replay", recorded, *grid).stdout == rendered(replay_text(document), 100) != plain
    assert trace("replay", recorded, *grid, "--wide").stdout == plain


def _row(names: str) -> dict:
    return dict.fromkeys(names.split(), 12345.678)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_of_benchmarks_fit_the_terminal(width):
    machine = {"gpu": None, "processor": "A processor with a long name, 2.25 GHz", "threads": 2, "copy_gb_per_s": 12.3}
    decode = _row(
        "decode_tokens_per_second decode_tokens_per_second_min decode_tokens_per_second_max speedup roofline_speedup "
        "roofline_share speedup_over_transformers fast_p50_ms mixed_p50_ms slow_p50_ms gb_per_s bandwidth_share"
    ) | {"policy": "transformers-dynamic", "context": 32768, "batch": 16, "slow_rate": 0.05, "kv_device_budget": None}
    document = {
        "machine": machine, "rows": [decode | {"lossless": None}], "skipped": [], "notes": ["a note. " * 40],
        "model": {"name": "qwen3-0.6b", "dtype": "bfloat16"}, "pays_from": [],
    }  # fmt: skip
    kernel = _row(
        "median_us p10_us p90_us gb_per_s bandwidth_share tflop_per_s speedup_over_dense speedup_over_sdpa "
        "speedup_over_paper_like"
    ) | {"op": "fast", "form": "ragged", "retention": 0.125, "failure": None}
    for parts in (bench_text(document), group_text({"rows": [kernel]}, title="Attention of a step")):
        lines = rendered(parts, width).splitlines()
        assert max(map(cell_len, lines)) <= width
        assert max(map(cell_len, rendered(parts[:1]).splitlines())) > 100


def test_the_screen_reader_draws_what_a_terminal_does():
    assert drawn("abc\r\nde\x1b[31mf\x1b[0m\x1b[1A\r\x1b[2Kxy", 10) == ["xy", "def"]
    assert drawn("0123456789ab", 10) == ["0123456789", "ab"]
    assert json.dumps(drawn("a\n\rb\x1b[?25l", 5)) == '["a", "b"]'


def test_the_list_of_all_settings_is_a_screen():
    whole = sfi("config", "list").stdout
    assert whole.count("\n") < 24
    assert "\nselector  alpha gamma beta" in whole
    table = sfi("config", "list", "selector").stdout
    assert re.search(r"selector\.alpha +0\.5 +float, in \(0, 1\] +Exponent of", table)
    assert "sink" in sfi("config", "list", "decoding").stdout


class Shown:
    def __init__(self) -> None:
        self.counts: list[tuple[str, int, int]] = []

    def update(self, phase: str, done: int, total: int) -> None:
        self.counts.append((phase, done, total))


def shown(limits: list[int], **options) -> Shown:
    progress = Shown()
    sfi_core.generate(
        tiny_qwen3(), None, [[5, 6, 7]] * len(limits), CONFIG, max_new_tokens=limits,
        stop_token_ids=(), observers=[ProgressObserver(progress, max(limits))], **options,
    )  # fmt: skip
    return progress


def test_a_file_shows_how_many_are_done_running_and_waiting():
    """Of five, two at a time: 1 ends first, 2 with its first token, then 0 and 3 together."""
    progress = shown([4, 2, 1, 3, 2], max_batch=2)
    assert progress.counts == [
        ("requests: 2 running, 3 waiting", 0, 5), ("requests: 2 running, 1 waiting", 2, 5),
        ("requests: 2 running, 1 waiting", 2, 5), ("requests: 1 running, 0 waiting", 4, 5),
    ]  # fmt: skip


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
        for more in ((), ("--json",))[: 1 + ("--play" not in command and command[0] != "export")]:
            ended = trace(*command, *more)
            assert ended.code in (0, 3), ended.stderr
            assert (ended.stdout + ended.stderr).replace("\n", "").isprintable(), command


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
