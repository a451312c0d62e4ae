"""Compiling every Triton kernel without a GPU: no spill, nothing over a limit, nothing left out."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

import sfi_kernels
from sfi_core.errors import BackendError
from sfi_core.measure.kernel_bench import compile_check
from sfi_core.measure.kernel_bench.compile_check import ARCHS, compile_kernels, default_arch, is_clean

ROOT = Path(__file__).parents[3]
HOME = Path(sfi_kernels.__path__[0])
DOCS = ROOT / "docs" / "evidence" / "kernels.md"
KERNEL = re.compile(r"^def _(\w+)_kernel\(", re.MULTILINE)
FLOOR = 150  # specializations, so that a loop that ends early does not pass
# list the specializations for a capability and compile some: with a place each third from there on, with -1 the widest
# float32 heads of the kernels with most registers; with both the first of every kernel; with -2 none
COMPILE = """
import json, sys
from sfi_kernels.launch import name_of
from sfi_kernels.offline import compile_launch, specializations

WIDEST = "fp32, D=256, G=2, soft cap"
TIGHT = {("split_attention", WIDEST + ", heads, mixed"), ("dense_attention", WIDEST), ("code_scan_sums", WIDEST)}
for place, capability in json.loads(sys.argv[1]):
    seen = set()
    for number, (label, launch) in enumerate(specializations(capability)):
        name = name_of(launch.kernel)
        asked = number % 3 == place if place >= 0 else (name, label) in TIGHT
        row = {"kernel": f"{name} [{label}]"}
        if asked or (name not in seen and place > -2):
            row = compile_launch(label, launch, capability)
        seen.add(name)
        print(json.dumps(row), flush=True)
"""
ROW = {
    "kernel": "pack [fp16, D=64]", "arch": "sm_80", "registers": 40, "spill_bytes": 0,
    "shared_bytes": 2048, "async_buffers": 0, "over_limit": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def _paths():
    """Let a process of its own find the packages without an install."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT / folder) for folder in (".", "kernels")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


def run(*asked: tuple[int, int]) -> list[dict]:
    """Run `COMPILE` for places and capabilities, without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(asked)]
    ran = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def listed(_paths) -> list[dict]:
    """List every specialization; compile each kernel's first, and three of the widest, for the least shared memory."""
    pytest.importorskip("triton")
    return [*{row["kernel"]: row for row in run((-2, 100), (-2, 90), (-1, 80))}.values()]


def names(rows: list[dict]) -> set[str]:
    return {row["kernel"].split(" [")[0] for row in rows}


def assert_every_kernel(rows: list[dict]) -> None:
    """Every kernel in the source is launched by an op that the specializations drive."""
    sources = HOME.rglob("*triton.py")
    written = {name for path in sources for name in KERNEL.findall(path.read_text())}
    assert len(written) >= 16
    assert names(rows) == written
    assert len({row["kernel"] for row in rows}) == len(rows)


def assert_pipelined(rows: list[dict], floor: int) -> None:
    kind = re.compile(r"(split_attention|dense_attention|window_logits) \[(bf|fp)16")
    # a gather and attention in place look up where a row lies before they load it
    looked_up = re.compile(", (gather|in place)")
    names = [row for row in rows if kind.match(row["kernel"])]
    attention = [row for row in names if not looked_up.search(row["kernel"])]
    assert len(attention) > floor
    assert [row for row in attention if row["async_buffers"] < 2] == []


def test_every_kernel_compiles_clean_and_attention_in_16_bits_is_pipelined(listed):
    some = [row for row in listed if "arch" in row]
    assert [row for row in some if not is_clean(row)] == []
    assert_every_kernel(some)
    assert_every_kernel(listed)
    assert len(listed) >= FLOOR
    assert_pipelined(some, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", range(len(ARCHS)), ids=ARCHS)
@pytest.mark.usefixtures("_paths")
def test_every_specialization_does_so_for_one_architecture_and_every_kernel_for_all(place):
    """Compile a third of them for each; `sfi kernel-bench --compile-only --arch` compiles all for all."""
    pytest.importorskip("triton")
    compiled = [row for row in run((place, int(ARCHS[place].removeprefix("sm_")))) if "arch" in row]
    assert [row for row in compiled if not is_clean(row)] == []
    assert_every_kernel(compiled)
    assert len(compiled) >= FLOOR
    assert_pipelined(compiled, 10)


def test_the_documentation_lists_every_specialization(listed):
    """Rewrite it with the command that CONTRIBUTING.md names."""
    rows = re.findall(r"^\| `(.*?)` \|", DOCS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(row["kernel"] for row in listed)


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Put a script in the compiler's place; it sees the arguments of `python -m sfi_kernels.offline`."""

    def put(script: str, parts: int = 2) -> None:
        file = tmp_path / "python"
        file.write_text(f"#!{sys.executable}\nimport json, os, sys\n{script}")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        monkeypatch.setattr(compile_check.os, "cpu_count", lambda: parts)

    return put


PRINT_ROWS = f"""
row = {ROW!r}
archs, part = sys.argv[3].split(","), sys.argv[4]
print(len(archs))
for arch in archs:
    print(json.dumps(row | {{"arch": arch, "kernel": f"part {{part}}"}}))
"""
ENDLESS = """
import pathlib, subprocess, time
compiler = subprocess.Popen(["sleep", "600"])
folder = pathlib.Path(sys.argv[0]).parent
(folder / f"ids-{sys.argv[4][0]}").write_text(f"{os.getpid()} {compiler.pid}")
print(3, flush=True)
print(json.dumps({"arch": "sm_90", "kernel": "pack"}), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("script", "archs", "told"),
    [
        ("print('at line 3', file=sys.stderr)\nsys.exit('Error: no such dtype\\n')", ["sm_90"], "Error: no such dtype"),
        ("os._exit(9)", ["sm_80", "sm_100"], "no message"),
    ],
)
def test_a_compiler_that_fails_is_quoted_with_its_last_line_if_any(child, script, archs, told):
    child(script)
    with pytest.raises(BackendError, match=f"^Triton kernels do not compile for {', '.join(archs)}: {told}$"):
        compile_kernels(archs)


def test_the_parts_come_together_in_the_order_of_architectures_and_names(child):
    child(PRINT_ROWS, parts=3)
    seen, totals = [], set()
    rows = compile_kernels(["sm_90", "sm_80"], lambda row, total: (seen.append(row), totals.add(total)))
    wanted = [(arch, f"part {part}/3") for arch in ("sm_90", "sm_80") for part in range(3)]
    assert [(row["arch"], row["kernel"]) for row in rows] == wanted
    assert sorted(map(json.dumps, seen)) == sorted(map(json.dumps, rows))
    assert 6 in totals <= {0, 6}


def test_ctrl_c_ends_the_compilers_and_what_they_started(child, tmp_path):
    child(ENDLESS)
    began = threading.Event()
    threading.Thread(target=lambda: began.wait(60) and os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        compile_kernels(["sm_90"], lambda *_: began.set() if len([*tmp_path.glob("ids-*")]) == 2 else None)
    for file in tmp_path.glob("ids-*"):
        worker, compiler = map(int, file.read_text().split())
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
        assert ended(compiler)


def ended(process: int) -> bool:
    for _ in range(1000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().split(") ")[1][0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_one_architecture_is_compiled_unless_more_are_asked_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert default_arch() == "sm_90"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for capability, arch in {(8, 9): "sm_80", (9, 0): "sm_90", (12, 0): "sm_100", (7, 5): "sm_90"}.items():
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda capability=capability: capability)
        assert default_arch() == arch


def test_the_compiler_runs_without_the_interpreter(child, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    child("sys.exit('interpreter' if 'TRITON_INTERPRET' in os.environ else 0)\n")
    assert compile_kernels(["sm_90"]) == []


def test_the_table_has_a_row_for_each_kernel_and_a_column_for_each_architecture():
    rows = [
        ROW,
        ROW | {"arch": "sm_90", "registers": 255, "spill_bytes": 16, "shared_bytes": 1536},
        ROW | {"kernel": "append [D=8]", "arch": "sm_90", "async_buffers": 3, "over_limit": True},
    ]
    text = SimpleNamespace(**run_path(str(ROOT / "docs" / "make_kernels_page.py"))).page(rows, "3.9.0")
    assert text.startswith("# What the compiler makes of the kernels\n")
    assert "--compile-only --arch sm_80,sm_90 --json" in text
    assert text.endswith("\n")
    assert text.splitlines()[-4:] == [
        "| kernel | sm_80 | sm_90 |",
        "|---|---|---|",
        "| `pack [fp16, D=64]` | 40 / 2.0 KB / 0 | 255 / 1.5 KB / 0, **spills 16 B** |",
        "| `append [D=8]` | - | 40 / 2.0 KB / 3, **over the limit** |",
    ]
