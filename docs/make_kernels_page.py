"""Write docs/evidence/kernels.md from the document of `sfi kernel-bench --compile-only --json` on stdin."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "evidence" / "kernels.md"
LIMITS = "163 KB of shared memory for a program on sm_80, 227 KB on sm_90 and sm_100"


def page(rows: Sequence[dict[str, Any]], triton: str) -> str:
    """Return the page: a row for each kernel, a column for each architecture."""
    archs = list(dict.fromkeys(row["arch"] for row in rows))
    cells = {(row["kernel"], row["arch"]): row for row in rows}
    lines = [
        "# What the compiler makes of the kernels",
        "",
        "Registers of a thread / shared memory of a program / tiles in flight by asynchronous copies, for",
        f"every specialization, compiled without a GPU by Triton {triton}. Written by",
        f"`sfi kernel-bench --compile-only --arch {','.join(archs)} --json | python docs/make_kernels_page.py`;",
        "a test compiles the same and fails on a spill or above",
        f"{LIMITS}.",
        "[kernels.md](../kernels.md#compile-them-without-a-gpu) explains the marks.",
        "",
        "| kernel | " + " | ".join(archs) + " |",
        "|---|" + "---|" * len(archs),
    ]
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    lines += [f"| `{name}` | {' | '.join(_cell(cells.get((name, arch))) for arch in archs)} |" for name in kernels]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{row['registers']} / {row['shared_bytes'] / 1024:.1f} KB / {row['async_buffers']}"
    spills = f", **spills {row['spill_bytes']} B**" if row["spill_bytes"] else ""
    return text + spills + (", **over the limit**" if row["over_limit"] else "")


if __name__ == "__main__":
    document = json.load(sys.stdin)
    PAGE.write_text(page(document["compiled"], document["versions"]["triton"]), encoding="utf-8")
