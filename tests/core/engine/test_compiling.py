"""What compiles: in which folder code is kept, when numba is not used, and whose time it is."""

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numba.core import event

from sfi_core.engine.ledger import Meter
from sfi_kernels import compiled
from sfi_kernels.compiled import telling
from sfi_kernels.dense_attention import dense_attention

pytest.importorskip("numba")


def fresh(tmp_path, script: str) -> str:
    """Run in a new process, with compiled code in a folder of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


SCRIPT = """
from sfi_kernels.compiled import telling, why_not
import sys, torch
assert "numba" not in sys.modules
print(why_not() or "usable", end=" ")
if not why_not():
    from sfi_kernels.loops.attention import attend
    from sfi_kernels.numba_ops import multiply_few
    from sfi_kernels.tables import row_of
    with telling(lambda: print("compiling", end=" ")):
        weight = torch.arange(64.0).view(2, 32)
        row = multiply_few(row_of(0, weight.shape, weight), torch.eye(32)[1:2]).view(-1)
    print(*map(int, row.tolist()), "kept" if attend.stats.cache_path else "not kept")
"""


@pytest.mark.exhaustive
def test_a_compilation_is_told_once_and_kept_where_a_folder_can_be_written(tmp_path):
    assert fresh(tmp_path, SCRIPT) == "usable compiling 1 33 kept\n"
    assert fresh(tmp_path, SCRIPT) == "usable 1 33 kept\n"


@pytest.mark.exhaustive
def test_without_a_folder_every_run_compiles(tmp_path):
    nowhere = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
""" + SCRIPT.replace('assert "numba" not in sys.modules', "")
    assert fresh(tmp_path, nowhere) == "usable compiling 1 33 not kept\n"


def double(numbers):
    numbers *= 2


def test_a_run_goes_on_where_the_folder_is_full_or_damaged(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def files():
        function, numbers = compiled.entry(double), np.ones(2)
        function(numbers)
        assert numbers.tolist() == [2, 2]
        return {path.suffix: path for path in tmp_path.rglob("*.*")}

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # the index fits, the code does not
    assert set(files()) == {".nbi"}
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    saved = files()
    whole = saved[".nbc"].read_bytes()
    saved[".nbc"].write_bytes(whole[:100])
    files()
    assert saved[".nbc"].stat().st_size == len(whole)
    saved[".nbi"].write_bytes(b"")
    files()
    assert saved[".nbi"].stat().st_size > 0


def test_numba_may_be_switched_off_or_broken(monkeypatch):
    ask = compiled.missing.__wrapped__  # not what has been told before
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert ask() == "NUMBA_DISABLE_JIT is set"
    monkeypatch.setitem(sys.modules, "numba.core", None)
    assert ask().startswith("not importable: ")


def cannot(*numbers):
    open(numbers)  # noqa: PTH123, SIM115 - numba knows no files


def test_the_reference_computes_where_a_loop_does_not_compile(monkeypatch, caplog):
    monkeypatch.setattr(compiled.Failure, "why", "")
    monkeypatch.setattr("sfi_kernels.loops.attention.attend", compiled.entry(cannot))
    key, table, length = torch.ones(1, 1, 16, 8), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    operands = torch.ones(1, 1, 1, 1, 8), key, 3 * key, table, length
    for _ in range(2):
        assert dense_attention.on("numba")(*operands, scale=1.0).eq(3).all()
    assert compiled.fastest("torch", key.device, key) == "torch"
    assert "numba does not compile" in compiled.why_not()
    assert caplog.text.count("sfi goes on in PyTorch's operators") == 1


def test_vllm_may_look_into_what_numba_brought():
    """Its start reads the `__dict__` of whatever any module holds, and asks it for a `kernel`."""
    assert not compiled.why_not()
    held = [value for module in list(sys.modules.values()) for value in [*getattr(module, "__dict__", {}).values()]]
    libraries = [value for value in held if type(value).__module__ == "llvmlite.binding.ffi"]
    assert libraries
    assert not any(vars(library).get("kernel") for library in libraries if hasattr(library, "__dict__"))


def test_a_thread_of_the_pool_leaves_its_maker_s_core():
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("one core")

    def bound() -> set[int]:
        os.sched_setaffinity(0, {min(cores)})  # as OpenMP binds the thread that vLLM's model runs in
        with compiled.pool.__wrapped__() as pool:
            return pool.submit(os.sched_getaffinity, 0).result()

    with ThreadPoolExecutor(1) as maker:
        assert maker.submit(bound).result() == cores


def test_an_outer_telling_keeps_its_own():
    heard: list[str] = []
    with telling(lambda: heard.append("outer")), telling(lambda: heard.append("inner")):
        from sfi_kernels import compiled  # noqa: PLC0415

        compiled._heard.get()()  # noqa: SLF001
    assert heard == ["outer"]


def compile_for(seconds: float) -> None:
    """Compile a function that calls another one, as far as the listeners hear."""
    with event.trigger_event("numba:compile"), event.trigger_event("numba:compile"):
        time.sleep(seconds)


def test_the_time_of_a_step_leaves_compilation_out_and_the_report_tells_it():
    assert not compiled.why_not()
    meter, began = Meter(), time.perf_counter()
    for _ in range(2):
        meter.begin()
        compile_for(0.2)
        meter.lap((0, 1), prefill=False)
    wall = time.perf_counter() - began
    assert 0.4 <= meter.compiling_seconds <= wall
    assert meter.decode_seconds <= wall - 0.4
    assert meter.prefill_seconds == 0
