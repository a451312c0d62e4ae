"""Compile every Triton kernel without a GPU, in subprocesses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sfi_core.errors import BackendError, ConfigError
from sfi_core.machine.versions import versions

ARCHS = ("sm_80", "sm_90", "sm_100")
LIMITS = "163 KB of shared memory for a program on sm_80, 227 KB on sm_90 and sm_100"


def compile_kernels(
    archs: Sequence[str] = ARCHS, on_kernel: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Compile every specialization of every kernel; a thread calls `on_kernel` with each row at once.

    Returns:
        A row for each: `kernel`, `arch`, `registers`, `spill_bytes`, `shared_bytes`, `async_buffers`,
        `over_limit`; in the order of `archs` and of names.

    Raises:
        ConfigError: An architecture is unknown.
        BackendError: The compiler failed.
    """
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown or not archs:
        raise ConfigError(f"arch must be from {ARCHS}, got {unknown or 'none'}")
    parts = os.cpu_count() or 1
    with ThreadPoolExecutor(parts) as pool:
        jobs = [pool.submit(_part, archs, f"{i}/{parts}", on_kernel) for i in range(parts)]
        rows = [row for job in jobs for row in job.result()]
    return sorted(rows, key=lambda row: (list(archs).index(row["arch"]), row["kernel"]))


def _part(archs: Sequence[str], part: str, on_kernel: Callable[[dict[str, Any]], None] | None) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sfi_kernels.offline", ",".join(archs), part]
    rows = []
    with subprocess.Popen(  # noqa: S603 - our own module
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None, "both are pipes"  # noqa: PT018
        with ThreadPoolExecutor(1) as drain:
            errors = drain.submit(process.stderr.read)
            for line in process.stdout:
                rows.append(json.loads(line))
                if on_kernel:
                    on_kernel(rows[-1])
            lines = errors.result().strip().splitlines() or ["no message"]
    if process.returncode:
        raise BackendError(f"Triton kernels do not compile for {', '.join(archs)}: {lines[-1]}")
    return rows


def is_clean(row: dict[str, Any]) -> bool:
    """Say whether a kernel neither spills registers nor exceeds the shared memory."""
    return not row["spill_bytes"] and not row["over_limit"]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Write the page docs/evidence/kernels.md."""
    archs = list(dict.fromkeys(row["arch"] for row in rows))
    cells = {(row["kernel"], row["arch"]): row for row in rows}
    lines = [
        "# What the compiler makes of the kernels",
        "",
        "Registers of a thread / shared memory of a program / tiles in flight by asynchronous copies, for",
        f"every specialization, compiled without a GPU by Triton {versions()['triton']}. Written by",
        f"`sfi kernel-bench --compile-only --arch {','.join(archs)} --output docs/evidence/kernels.md`;",
        "a test compiles the same and fails on a spill or above",
        f"{LIMITS}.",
        "[kernels.md](../kernels.md#compile-them-without-a-gpu) explains the marks.",
        "",
        "| kernel | " + " | ".join(archs) + " |",
        "|---|" + "---|" * len(archs),
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = [_cell(cells.get((kernel, arch))) for arch in archs]
        lines.append(f"| `{kernel}` | " + " | ".join(found) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{row['registers']} / {row['shared_bytes'] / 1024:.1f} KB / {row['async_buffers']}"
    spills = f", **spills {row['spill_bytes']} B**" if row["spill_bytes"] else ""
    return text + spills + (", **over the limit**" if row["over_limit"] else "")
