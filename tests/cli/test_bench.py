"""`sfi bench` and `sfi kernel-bench` from the outside: what they print and write, and how they say no."""

import json
import re
import sys
from dataclasses import asdict
from types import ModuleType

import pytest

from sfi_cli.commands.bench.views import _paying
from sfi_cli.settings import BenchTable
from sfi_core.measure.bench import bench, theirs
from sfi_core.measure.bench.rows import pays_from
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.measure.kernel_bench import attention_cases, compile_check, timing
from sfi_core.measure.kernel_bench.settings import KernelSettings
from tests.cli.trace_commands import Ended, sfi

pytestmark = pytest.mark.usefixtures("small_buffers")

SMALL = (
    "--policy", "sfi,full-kv", "--context", "300", "--steps", "5", "--repeats", "1", "--budget", "64",
    "--set", "recent=32", "--slow-rate", "1/5", "--device", "cpu",
)  # fmt: skip
ROW_KEYS = {  # what scripts rely on
    "policy", "context", "batch", "decode_tokens_per_second", "speedup", "roofline_speedup", "slow_rate",
    "bytes_per_step",
}  # fmt: skip
TINY = {
    "model_type": "qwen3", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def inside(*arguments: str) -> Ended:
    return sfi("bench", *arguments)


@pytest.fixture
def tiny(tmp_path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder / "config.json")


def test_the_help_shows_the_real_defaults():
    settings = DecodeSettings()
    for name, value in asdict(BenchTable()).items():
        assert value == getattr(settings, name)


def test_the_document_has_the_keys_that_scripts_rely_on():
    code, stdout, stderr = inside(*SMALL, "--batch", "1,2", "--json")
    document = json.loads(stdout)
    assert code == 0
    assert stderr.replace("compiling for this processor (once)\n", "").startswith("loading bundled\nsfi, ")
    assert len(re.findall(r"^[\w-]+, 300 tokens x [12], repeat 1: [\d.,]+ tokens/s$", stderr, re.MULTILINE)) == 8
    assert {"rows", "machine"} <= set(document)
    assert document["model"]["name"] == "bundled"
    policies = ["sfi", "full-kv", "transformers-dynamic", "transformers-static"]
    assert [(row["batch"], row["policy"]) for row in document["rows"]] == [
        (batch, policy) for batch in (1, 2) for policy in policies
    ]
    assert [(row["batch"], row["longest_context"]) for row in document["pays_from"]] == [(1, 300), (2, 300)]
    for row in document["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["speedup"] is not None
    assert document["rows"][0]["slow_rate"] == 0.2


def test_the_last_line_says_from_which_context_on_a_policy_pays():
    """`sfi` at the longest two of three contexts, though also at the shortest; `codescan` nowhere."""
    speedups = {"sfi": (1.1, 0.9, 1.2, 1.5), "codescan": (1.2, 1.3, 1.4, 1.0), "full-kv": (1.0,) * 4}
    rows = [
        {"policy": policy, "batch": 1, "context": 1000 * 2**place, "speedup": speedup}
        for policy, measured in speedups.items()
        for place, speedup in enumerate(measured)
    ]
    line = "sfi pays from 4,000 tokens on here; codescan does not pay up to 8,000 tokens here"
    assert _paying(pays_from(rows)) == [line]
    twice = [*rows, *({**row, "batch": 2} for row in rows)]
    assert _paying(pays_from(twice)) == [f"batch 1: {line}", f"batch 2: {line}"]
    assert pays_from([{**row, "speedup": None} for row in rows]) == []


def test_random_weights_need_a_config_only(tiny):
    arguments = (
        "--random-weights", tiny, "--context", "200", "--steps", "10", "--repeats", "1", "--budget", "32",
        "--set", "recent=16", "--baseline", "none", "--batch", "2", "--json",
    )  # fmt: skip
    code, stdout, _ = inside(*arguments)
    document = json.loads(stdout)
    assert code == 0
    assert document["model"]["dtype"] == "bfloat16"
    assert document["settings"]["slow_rate"] == "1/20"


TIERED = (
    "--policy", "freekv", "--policy", "synckv,full-kv", "--set", "synckv.heads=even",
    "--context", "600", "--steps", "6", "--repeats", "2", "--budget", "64",
    "--set", "recent=32", "--baseline", "none", "--kv-device-budget", "90%",
)  # fmt: skip


@pytest.mark.exhaustive
def test_policies_run_under_a_device_budget_beside_full_attention_without_one(tiny):
    """Two layers of two heads, one of them dense in freekv; a row of one head has 32 bytes; 20 pages of 32 tokens."""
    code, stdout, _ = inside("--random-weights", tiny, *TIERED, "--json")
    assert code == 0
    document = json.loads(stdout)
    rows = {row["policy"]: row for row in document["rows"]}
    for policy, hosted in (("freekv", 1), ("synckv", 2)):
        row = rows[policy]
        assert (row["kv_device_budget"], row["kv_host_bytes"]) == ("90%", hosted * 2 * 32 * 640)
        assert 0 < row["kv_device_bytes"] < 0.9 * 2 * 2 * 32 * 640
        assert row["recalled_bytes_per_step"] > 0
    whole = ("kv_device_budget", "kv_device_bytes", "kv_host_bytes", "recalled_bytes_per_step")
    assert [rows["full-kv"][name] for name in whole] == [None] * 4
    assert document["settings"]["kv_device_budget"] == "90%"
    assert any(note.startswith("full-kv: all keys and values on") for note in document["notes"])


def test_lossless_rows_have_a_stated_acceptance():
    common = ("--policy=sfi,full-kv", "--baseline=none", "-q", "--device=cpu", "--repeats=1", "--steps=8")
    sizes = ("--context=300", "--budget=64", "--set=recent=32")
    code, stdout, _ = inside(*common, *sizes, "--acceptance=0.9", "--batch=2")
    assert code == 0
    assert re.search(r"^  sfi-lossless +300 +2 +90\.0% ", stdout, re.MULTILINE)
    assert "* lossless rows: acceptance is stated, 0.9 for each tested token" in stdout


@pytest.mark.exhaustive
def test_lists_come_by_comma_or_repeated_and_in_thousands(tiny):
    refusal = "error: contexts must be whole numbers such as 8192 or 8K, got '0.25K'\n"
    assert inside("--random-weights", tiny, "--context", "64,0.25K")[::2] == (2, refusal)
    code, stdout, _ = inside(
        "--random-weights", tiny, "--context", "64", "--context", "1K", "--policy", "full-kv,quest",
        "--policy", "streaming-llm", "--steps", "3", "--repeats", "1", "--baseline", "none", "--json",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(stdout)["rows"]
    assert [(row["context"], row["policy"]) for row in rows] == [
        (context, policy) for context in (64, 1024) for policy in ("full-kv", "quest", "streaming-llm")
    ]
    assert rows[-1]["slow_rate"] == 0


def test_json_and_figure_are_written_and_not_overwritten(tmp_path):
    pytest.importorskip("matplotlib")
    plot, file = (tmp_path / name for name in ("x.png", "x.json"))
    arguments = (*SMALL, "--baseline", "none", "--json", "-o", str(file), "--plot", str(plot))
    file.write_text("mine")
    line = f"error: output {file} exists; add --force to overwrite it\n"
    assert (inside(*arguments)[::2], file.read_text()) == ((2, line), "mine")
    code, stdout, stderr = inside(*arguments, "--force")
    assert code == 0
    assert f"Wrote {file}\nWrote {plot}\n" in stderr
    assert json.loads(file.read_text()) == json.loads(stdout)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [file, plot]


@pytest.mark.exhaustive
def test_ctrl_c_writes_and_shows_the_rows_so_far_and_ends_with_130(tmp_path, monkeypatch):
    run, calls = theirs.run_theirs, []

    def stopped(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(theirs, "run_theirs", stopped)
    file = tmp_path / "x.json"
    code, stdout, stderr = inside(*SMALL, "--repeats", "2", "-o", str(file))
    document = json.loads(file.read_text())
    assert code == 130
    assert stderr.endswith("interrupted\n")
    assert document["interrupted"] is True
    policies = ("sfi", "full-kv", "transformers-dynamic", "transformers-static")
    repeats = zip(policies, (2, 2, 1, 1), strict=True)
    assert [(row["policy"], row["repeats"]) for row in document["rows"]] == list(repeats)
    for policy in policies:
        assert re.search(rf"^  {policy} +300 +1 ", stdout, re.MULTILINE)
    assert re.search(r"^  full-kv .* 1\.00x +1\.00x +100% ", stdout, re.MULTILINE)
    assert "* transformers: greedy model.generate on the same model" in stdout
    assert "…" not in stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--context", "x"), 2, "contexts must be whole numbers such as 8192 or 8K, got 'x'"),
        (("--slow-rate", "often"), 2, "slow_rate must be a share such as 1/20 or 0.05, got 'often'"),
        (("--set", "t_max=9"), 2, "t_max has no effect here, only on sfi generate, "),
        (("--random-weights", "qwen9"), 3, "random weights must be one of ('qwen3-0.6b',"),
        (("--random-weights", "qwen3-4b", "--model", "x"), 2, "random_weights must come without --model"),
        (("--set", "forecast.bandwidth=10"), 2, "forecast.bandwidth must come with --forecast"),
        (("--forecast", "--set", "forecast.memory=0"), 2, "forecast.memory must be positive, got 0.0"),
        (("--forecast", "--kv-device-budget", "20%"), 2, "engine.kv_device_budget must come without --forec"),
        (("--kv-device-budget", "20"), 2, "kv_device_budget must hold sink + recent + one page, at least "),
        (("--forecast", "--policy", "synckv"), 2, "synckv.heads must be a file of head clusters, got none"),
        (("--forecast", "--acceptance", "0.9"), 2, "acceptance must come without --forecast"),
        (("--set", "model.weights=int8", "--dtype", "bfloat16"), 4, "weights=int8 must be in float32 on a CPU"),
        (("--set", "engine.graphs=true"), 4, "graphs must run on a CUDA device, got cpu; drop engine.graphs"),
        (("--device", "cuda:99"), 4, "device cuda:99 is not on this machine"),
        (("--threads", "0"), 2, "threads must be positive, got 0"),
        (("-o", "x.csv"), 2, "output must end in .json, got x.csv"),
        (("--plot", "x.pdf"), 2, "plot must end in one of ('.png', '.svg'), got x.pdf"),
    ],
)
def test_mistakes_end_with_one_line(arguments, code, words):
    if "--device" not in arguments:
        arguments = (*arguments, "--device", "cpu")
    exit_code, stdout, stderr = inside(*arguments)
    assert (exit_code, stdout) == (code, "")
    assert words in stderr
    assert stderr.count("\n") == 1 or stderr.startswith("loading")


@pytest.mark.exhaustive
def test_a_point_that_does_not_fit_says_what_does(monkeypatch):
    free = bench.free_bytes
    monkeypatch.setattr(bench, "free_bytes", lambda device: min(free(device), 100_000_000))
    code, stdout, _ = inside(*SMALL, "--batch=1,200", "--baseline=none", "-q")
    assert code == 0
    assert re.search(r"Did not fit\n(.*\n)+?  sfi +300 +200 +\d+\.\d\d +0\.10 +\d+\n", stdout)
    code, _, stderr = inside("--context", "100000", "--batch", "8", "--device", "cpu")
    assert code == 4
    assert re.search(r"the benchmark must fit 0\.10 GB of free memory, got at least .*batch \d+ fits", stderr)


def test_a_forecast_runs_nothing_and_needs_no_weights(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("sfi_core.measure.bench.bench.run_bench", None)
    file = tmp_path / "x.json"
    machine = ("--set=forecast.bandwidth=4300", "--set=forecast.memory=149")
    asked = ("--context=8K,32K", "--random-weights=qwen3-4b", "--batch=16", "--preset=paper")
    code, stdout, _ = inside("--forecast", *machine, *asked, "-o", str(file))
    assert code == 0
    assert re.search(r"^  sfi +8,192 +16 .* 4,68\d +1\.86x +2,5\d\d$", stdout, re.MULTILINE)
    rows = json.loads(file.read_text())["rows"]
    assert [(row["context"], row["policy"]) for row in rows] == [
        (context, policy) for context in (8192, 32768) for policy in ("sfi", "codescan", "full-kv")
    ]
    folder = str(file.parent / "tiny")
    bare = ("--forecast", "--set=forecast.bandwidth=1", "-q")
    code, stdout, _ = inside(*bare, "--model", folder, "--json")
    assert code == 0
    assert json.loads(stdout)["model"]["architecture"] == "Qwen3ForCausalLM"
    assert inside(*bare)[0] == 0


SHAPE = (
    "--context", "700", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16",
    "--repeats", "2", "--device", "cpu",
)  # fmt: skip
KERNEL_KEYS = {  # what scripts rely on
    "op", "backend", "retention", "context", "batch", "median_us", "bytes", "gb_per_s", "bandwidth_share",
    "speedup_over_dense", "matches_reference",
}  # fmt: skip
COMPILED = {
    "kernel": "split_attention [bf16]", "arch": "sm_90", "registers": 128, "spill_bytes": 0,
    "shared_bytes": 106496, "async_buffers": 3, "over_limit": False,
}  # fmt: skip


def kernels(*arguments: str) -> Ended:
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


def test_the_kernels_document_has_the_keys_that_scripts_rely_on():
    code, stdout, _ = kernels(*SHAPE, "--retention", "0.5", "--json")
    document = json.loads(stdout)
    assert code == 0
    assert set(document) >= {"rows", "compiled", "machine"}
    ops = {row["op"] for row in document["rows"]}
    rivals = {"dense.sdpa", "project.torch", "prompt.sdpa", "prompt.piece", "prompt.piece.sdpa"}
    assert ops == {*KernelSettings().ops, *rivals}
    for row in document["rows"]:
        assert set(row) >= KERNEL_KEYS
        assert row["matches_reference"] is True
        shape = row["backend"], row["context"], row["batch"]
        assert shape == ("torch", 700, 2) or row["op"].startswith("prompt")


def test_a_prompt_needs_no_retention():
    code, stdout, _ = kernels(*SHAPE, "--op", "prompt", "--json")
    assert code == 0
    assert {row["op"] for row in json.loads(stdout)["rows"]} >= {"prompt", "prompt.piece", "dense"}


def test_on_a_cpu_it_says_that_it_times_pytorch():
    _, stdout, stderr = kernels(*SHAPE, "--retention", "0.5", "--op", "dense")
    assert "benchmarking the torch backend on cpu" in stderr
    assert "the PyTorch backend on cpu was timed, not the Triton kernels" in stdout


def test_the_sweep_shows_table_1_beside_the_bytes_and_ours():
    code, stdout, _ = kernels(*SHAPE, "--sweep", "retention")
    assert code == 0
    table = stdout[stdout.index("Table 1") :]
    assert re.search(r"\s50 +2\.10x +2\.00x +\d+\.\d\dx +\d+\.\d\dx +-\n", table)
    assert re.search(r"\s100 +1\.00x +1\.00x", table)


def test_the_kernels_file_is_written_and_not_overwritten(tmp_path):
    table = tmp_path / "x.json"
    table.write_text("mine")
    arguments = (*SHAPE, "--retention", "0.5", "-o", str(table))
    line = f"error: output {table} exists; add --force to overwrite it\n"
    assert (kernels(*arguments)[::2], table.read_text()) == ((2, line), "mine")
    code, stdout, stderr = kernels(*arguments, "--force")
    assert code == 0
    assert f"Wrote {table}\n" in stderr
    assert "fast" in stdout
    assert {row["op"] for row in json.loads(table.read_text())["rows"]} >= {"fast", "dense"}
    assert sorted(tmp_path.iterdir()) == [table]


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
    code, stdout, stderr = kernels(*arguments)
    document = json.loads(file.read_text())
    assert code == 130
    assert stderr.endswith("interrupted\n")
    assert document["interrupted"] is True
    assert {row["repeats"] for row in document["rows"]} == {1}
    assert "dense" in stdout


def test_a_wrong_op_ends_with_one_line_after_the_others_are_written(tmp_path, monkeypatch):
    class Wrong:
        @staticmethod
        def reference(query, *_, **__):
            return query

    monkeypatch.setattr(attention_cases, "sparse_attention", Wrong)
    file = tmp_path / "x.json"
    code, stdout, stderr = kernels(*SHAPE, "--retention", "0.5", "-o", str(file))
    assert code == 1
    red = "error: every op must run and equal its formula up to rounding, got fast at"
    assert stderr.startswith(red)
    assert stderr.count("\n") == 1
    assert re.search(r"\n +fast +50 +FAILED ", stdout)
    assert "* failed: fast at retention 0.5 (" in stdout
    rows = {row["op"]: row for row in json.loads(file.read_text())["rows"]}
    assert (rows["fast"]["matches_reference"], rows["fast"]["speedup_over_dense"]) == (False, None)
    assert rows["dense"]["median_us"] > 0


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
        (("-o", "x.csv"), 2, "output must end in .json, got x.csv"),
        (("-o", "/no/such/folder/x.json"), 1, "cannot be written: No such file or directory"),
        (("--context", "1000000000"), 4, "the benchmark must fit"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(arguments, code, words):
    exit_code, stdout, stderr = kernels(*arguments)
    assert (exit_code, stdout) == (code, "")
    assert words in stderr
    assert stderr.count("\n") == 1


def test_compile_only_gives_the_documents_compiled_rows(compiler):
    document = json.loads(kernels("--compile-only", "--json", "-q")[1])
    assert document["rows"] == []
    assert [row["arch"] for row in document["compiled"]] == ["sm_90"]
    assert set(document["compiled"][0]) >= {"kernel", "arch", "registers", "spill_bytes", "shared_bytes"}


@pytest.mark.parametrize("fault", [{"spill_bytes": 8}, {"over_limit": True}])
def test_a_spill_or_too_much_shared_memory_fails(compiler, fault):
    compiler[0].update(fault)
    code, stdout, stderr = kernels("--compile-only", "--arch", "sm_90")
    assert code == 1
    assert "split_attention [bf16] on sm_90" in stderr
    assert "ok" not in stdout
