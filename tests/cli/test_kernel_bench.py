"""`sfi kernel-bench` from the outside: what it prints and writes, and how it says no."""

import json
import re
import sys
from types import ModuleType

import pytest

from sfi_core.measure.kernel_bench import attention_cases, compile_check, timing
from sfi_core.measure.kernel_bench.settings import KernelSettings
from tests.cli.trace_commands import Ended, sfi

pytestmark = pytest.mark.usefixtures("small_buffers")

SHAPE = (
    "--context", "700", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
    "--repeats", "2", "--device", "cpu",
)  # fmt: skip
ROW_KEYS = {  # what scripts rely on
    "op", "backend", "retention", "context", "batch", "median_us", "bytes", "gb_per_s", "bandwidth_share",
    "speedup_over_dense", "matches_reference",
}  # fmt: skip
COMPILED = {
    "kernel": "split_attention [bf16]", "arch": "sm_90", "registers": 128, "spill_bytes": 0,
    "shared_bytes": 106496, "async_buffers": 3, "over_limit": False,
}  # fmt: skip


def inside(*arguments: str) -> Ended:
    return sfi("kernel-bench", *arguments)


@pytest.fixture
def compiler(monkeypatch) -> list:
    """A stand-in for the offline compiler; the rows it gives can be changed."""
    rows = [dict(COMPILED)]
    module = ModuleType("sfi_core.measure.kernel_bench.compile_check")
    module.ARCHS, module.is_clean = compile_check.ARCHS, compile_check.is_clean
    module.default_arch = lambda: "sm_90"
    module.compile_kernels = lambda archs, _: [row | {"arch": arch} for arch in archs for row in rows]
    monkeypatch.setitem(sys.modules, "sfi_core.measure.kernel_bench.compile_check", module)
    return rows


def test_the_document_has_the_keys_that_scripts_rely_on():
    code, stdout, _ = inside(*SHAPE, "--retention", "0.5", "--json")
    document = json.loads(stdout)
    assert code == 0
    assert set(document) >= {"rows", "compiled", "machine"}
    ops = {row["op"] for row in document["rows"]}
    rivals = {"dense.sdpa", "prompt.sdpa", "prompt.piece", "prompt.piece.sdpa"}
    assert ops == {*KernelSettings().ops, *rivals}
    for row in document["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["matches_reference"] is True
        shape = row["backend"], row["context"], row["batch"]
        assert shape == ("torch", 700, 2) or row["op"].startswith("prompt")


def test_a_prompt_needs_no_retention():
    code, stdout, _ = inside(*SHAPE, "--op", "prompt", "--json")
    assert code == 0
    assert {row["op"] for row in json.loads(stdout)["rows"]} >= {"prompt", "prompt.piece", "dense"}


def test_on_a_cpu_it_says_that_it_times_pytorch():
    _, stdout, stderr = inside(*SHAPE, "--retention", "0.5", "--op", "dense")
    assert "benchmarking the torch backend on cpu" in stderr
    assert "the PyTorch backend on cpu was timed, not the Triton kernels" in stdout


def test_the_sweep_shows_table_1_beside_the_bytes_and_ours():
    code, stdout, _ = inside(*SHAPE, "--sweep", "retention")
    assert code == 0
    table = stdout[stdout.index("Table 1") :]
    assert re.search(r"\s50 +2\.10x +2\.00x +\d+\.\d\dx +\d+\.\d\dx +-\n", table)
    assert re.search(r"\s100 +1\.00x +1\.00x", table)


def test_json_and_figure_are_written_and_not_overwritten(tmp_path):
    pytest.importorskip("matplotlib")
    table, plot = tmp_path / "x.json", tmp_path / "x.png"
    table.write_text("mine")
    arguments = (*SHAPE, "--retention", "0.5", "-o", str(table), "--plot", str(plot))
    line = f"error: output {table} exists; add --force to overwrite it\n"
    assert (inside(*arguments)[::2], table.read_text()) == ((2, line), "mine")
    code, stdout, stderr = inside(*arguments, "--force")
    assert code == 0
    assert f"Wrote {table}\nWrote {plot}\n" in stderr
    assert "fast" in stdout
    assert {row["op"] for row in json.loads(table.read_text())["rows"]} >= {"fast", "dense"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [table, plot]


def test_ctrl_c_writes_the_rows_so_far_and_ends_with_130(tmp_path, monkeypatch):
    class Once(timing.CpuClock):
        rounds = 0

        def time(self, calls):
            Once.rounds += len(calls) > timing.COPIES or len(calls) == 3
            if Once.rounds > 1:
                raise KeyboardInterrupt
            return super().time(calls)

    monkeypatch.setattr(timing, "CpuClock", Once)
    file = tmp_path / "x.json"
    arguments = (*SHAPE, "--op", "dense", "--retention", "0.5", "-o", str(file))
    code, stdout, stderr = inside(*arguments)
    document = json.loads(file.read_text())
    assert code == 130
    assert stderr.endswith("interrupted\n")
    assert document["interrupted"] is True
    assert {row["repeats"] for row in document["rows"]} == {1}
    assert "dense" in stdout


def test_a_wrong_op_ends_with_one_line_after_the_others_are_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    class Wrong:
        @staticmethod
        def reference(query, *_, **__):
            return query

    monkeypatch.setattr(attention_cases, "sparse_attention", Wrong)
    file, plot = tmp_path / "x.json", tmp_path / "x.png"
    arguments = (*SHAPE, "--retention", "0.5", "-o", str(file), "--plot", str(plot))
    code, stdout, stderr = inside(*arguments)
    assert code == 1
    red = "error: every op must run and equal its formula up to rounding, got fast at"
    assert stderr.startswith(red)
    assert stderr.count("\n") == 1
    assert re.search(r"\n +fast +50 +FAILED ", stdout)
    assert "* failed: fast at retention 0.5 (" in stdout
    rows = {row["op"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows["fast"]["matches_reference"], rows["fast"]["speedup_over_dense"]) == (False, None)
    assert rows["dense"]["median_us"] > 0
    assert not plot.exists()  # it would be of `fast`


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--backend", "triton", "--device", "cpu"), 4, "backend triton must have a CUDA device"),
        (("--backend", "cuda"), 2, "unknown backend 'cuda'; expected one of ('auto', 'torch', 'triton')"),
        (("--device", "tpu"), 2, "unknown device 'tpu'"),
        (("--device", "cuda:99"), 4, "device cuda:99 is not on this machine"),
        (("--retention", "half"), 2, "retention must be a number, got 'half'"),
        (("--context", "99"), 2, "context must be at least 261"),
        (("--sweep", "batch"), 2, "unknown sweep 'batch'; expected one of ('retention',)"),
        (("--sweep", "retention", "--retention", "0.5"), 2, "retention must not be given with --sweep"),
        (("--compile-only", "--arch", "sm_70"), 2, "unknown arch 'sm_70'; did you mean 'sm_90'? expected one of ("),
        (("--arch", "sm_90"), 2, "arch must come with --compile-only"),
        (("--compile-only", "--sweep", "retention"), 2, "compile-only times nothing"),
        (("--plot", "x.pdf"), 2, "plot must end in one of ('.png', '.svg'), got x.pdf"),
        (("--plot", "x.png", "--op", "pack"), 2, "op must include fast for --plot"),
        (("-o", "x.csv"), 2, "output must end in one of ('.json',), got x.csv"),
        (("-o", "/no/such/folder/x.json"), 1, "cannot be written: No such file or directory"),
        (("--context", "1000000000"), 4, "the benchmark must fit"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(arguments, code, words):
    got, stdout, stderr = inside(*arguments)
    assert (got, stdout) == (code, "")
    assert words in stderr
    assert stderr.count("\n") == 1


def test_compile_only_gives_the_documents_compiled_rows(compiler):
    document = json.loads(inside("--compile-only", "--json", "-q")[1])
    assert document["rows"] == []
    assert [row["arch"] for row in document["compiled"]] == ["sm_90"]
    assert set(document["compiled"][0]) >= {"kernel", "arch", "registers", "spill_bytes", "shared_bytes"}


@pytest.mark.parametrize("fault", [{"spill_bytes": 8}, {"over_limit": True}])
def test_a_spill_or_too_much_shared_memory_fails(compiler, fault):
    compiler[0].update(fault)
    code, stdout, stderr = inside("--compile-only", "--arch", "sm_90")
    assert code == 1
    assert "split_attention [bf16] on sm_90" in stderr
    assert "ok" not in stdout
