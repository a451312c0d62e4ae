"""A long trace of made-up selections, and what looking at it costs.

    python benchmarks/long_trace.py build/long              32K steps, 36 layers, 8 KV heads
    python benchmarks/long_trace.py build/long --audit 512  with supports
    python benchmarks/long_trace.py build/long --measure    time, peak memory, size of what is there

The tables go straight to the files that a recording writes. Every 20th step or so ends a sentence, and the
step after it is slow. A refresh of a layer and KV head holds `budget` positions in runs of 8, of which it
keeps about 0.7 of the one before; all lie in the prompt. Times are about those of a 4B model on a GPU;
nothing in the trace is measured.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

from benchmarks.made_trace import Shape, write  # noqa: E402


def measure(folder: Path, shape: Shape) -> Iterator[tuple[str, float, float, float, float | None]]:
    """Run the commands that open a trace, each in a process of its own.

    Yields:
        The command, its seconds, those of a processor's core, its peak memory in MB, and the MB of its file.
    """
    page = folder.with_name(f"{folder.name}-report.html")
    step = ["--step", str(shape.steps - 10)]
    commands = {
        "trace show": ["show", str(folder)],
        f"trace show {' '.join(step)}": ["show", str(folder), *step],
        "trace report": ["report", str(folder), "--output", str(page), "--force"],
    }
    for name, arguments in commands.items():
        begin = time.monotonic()
        process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-m", "sfi_cli", "trace", *arguments], stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        assert status == 0, f"sfi {name} ended with {status}"
        busy = usage.ru_utime + usage.ru_stime
        written = page.stat().st_size / 1e6 if name == "trace report" else None
        yield f"sfi {name}", seconds, busy, usage.ru_maxrss / 1000, written


def main() -> None:
    """Write a trace, or measure one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--measure", action="store_true", help="look at the trace that is there")
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    arguments = vars(parser.parse_args())
    folder, measured = arguments.pop("folder"), arguments.pop("measure")
    shape = Shape(**{name: value for name, value in arguments.items() if value is not None})
    if not measured:
        write(folder, shape)
    whole = sum(file.stat().st_size for file in folder.rglob("*.parquet")) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"{folder}: {whole:,.0f} MB; this process took {peak:,.0f} MB of memory")
    if measured:
        print("| command | seconds | of a core | peak memory | file |\n|---|---|---|---|---|")
        for command, seconds, busy, memory, written in measure(folder, shape):
            size = "" if written is None else f"{written:.1f} MB"
            print(f"| `{command}` | {seconds:.1f} | {busy:.1f} | {memory:,.0f} MB | {size} |")


if __name__ == "__main__":
    main()
