"""Compile every Triton kernel without a GPU, in subprocesses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from sfi_core.errors import BackendError

OnKernel = Callable[[dict[str, Any], int], None]
ARCHS = ("sm_80", "sm_90", "sm_100")


def default_arch() -> str:
    """Return the newest of `ARCHS` that this machine's GPU runs; sm_90 without one."""
    if not torch.cuda.is_available():
        return "sm_90"
    major, minor = torch.cuda.get_device_capability()
    known = [arch for arch in ARCHS if int(arch.removeprefix("sm_")) <= 10 * major + minor]
    return known[-1] if known else "sm_90"


def compile_kernels(archs: Sequence[str] = ARCHS, on_kernel: OnKernel | None = None) -> list[dict[str, Any]]:
    """Compile every specialization of every kernel, in a process for each core; return their rows by arch and name.

    A thread calls `on_kernel` with each row at once, and with the number of all rows, 0 while it is unknown. An error
    or Ctrl-C ends the processes. Raise `BackendError` if the compiler failed.
    """
    parts = os.cpu_count() or 1
    totals: list[int] = []

    def noted(row: dict[str, Any]) -> None:
        if on_kernel:
            on_kernel(row, sum(totals) if len(totals) == parts else 0)

    with ExitStack() as pipes, ThreadPoolExecutor(2 * parts) as pool:
        processes: list[subprocess.Popen[str]] = []
        try:
            processes += (pipes.enter_context(_started(archs, f"{part}/{parts}")) for part in range(parts))
            jobs = [pool.submit(_rows, process, archs, pool, totals, noted) for process in processes]
            rows = [row for job in jobs for row in job.result()]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    return sorted(rows, key=lambda row: (list(archs).index(row["arch"]), row["kernel"]))


def _started(archs: Sequence[str], part: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sfi_kernels.offline", ",".join(archs), part]
    return subprocess.Popen(  # noqa: S603 - our own module, and a session of its own, to end its compilers with it
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def _rows(
    process: subprocess.Popen[str], archs: Sequence[str], pool: ThreadPoolExecutor, totals: list[int],
    noted: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:  # fmt: skip
    assert process.stdout is not None and process.stderr is not None, "both are pipes"  # noqa: PT018
    rows = []
    errors = pool.submit(process.stderr.read)
    for line in process.stdout:
        number_or_row = json.loads(line)
        if isinstance(number_or_row, int):
            totals.append(number_or_row)
        else:
            rows.append(number_or_row)
            noted(number_or_row)
    lines = errors.result().strip().splitlines() or ["no message"]
    if process.wait():
        raise BackendError(f"Triton kernels do not compile for {', '.join(archs)}: {lines[-1]}")
    return rows


def is_clean(row: dict[str, Any]) -> bool:
    """Say whether a kernel neither spills registers nor exceeds the shared memory."""
    return not row["spill_bytes"] and not row["over_limit"]
