"""Stage 1: versions, what nvidia-smi says, copy bandwidth, what the clock adds."""

import subprocess
from importlib.util import find_spec
from shutil import which
from typing import Any

from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from sfi_core.machine.memory import describe_measured
from sfi_core.machine.versions import versions
from sfi_core.measure.kernel_bench.timing import clock_for, copy_gb_per_s, floor_us

QUERY = "name,driver_version,memory.used,memory.total,clocks.sm,clocks.mem,temperature.gpu,mig.mode.current"
OPTIONAL = ("duckdb", "nvtx", "xdist")


def look(journal: Journal, plan: Plan) -> None:
    """Note the machine."""
    device = plan.device
    journal.trial("versions", lambda: {**versions()})
    journal.trial("machine", lambda: describe_measured(device))
    journal.trial("packages", lambda: {name: find_spec(name) is not None for name in OPTIONAL})
    journal.trial("nvidia-smi", _smi)
    for name, backend in (("events", "torch"), ("graph replays", "triton")):

        def clock(backend: str = backend) -> dict[str, Any]:
            timed = clock_for(device, backend)
            return {"copy_gb_per_s": copy_gb_per_s(device, timed), "floor_us": floor_us(device, timed)}

        if backend == "torch" or plan.graphs:
            journal.trial(f"clock of {name}", clock)


def _smi() -> dict[str, Any]:
    program = which("nvidia-smi")
    if program is None:
        return {"said": "there is no nvidia-smi here"}
    done = subprocess.run(  # noqa: S603 - found on the path by its own name
        [program, f"--query-gpu={QUERY}", "--format=csv"], capture_output=True, text=True, check=False, timeout=20
    )
    return {"said": (done.stdout + done.stderr).strip()}
