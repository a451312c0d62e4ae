"""The first look at a GPU: seven stages in one process, the most basic first, a JSON file after each.

    python benchmarks/smoke.py --output smoke.json
    python benchmarks/smoke.py --dry-run        the same code on a CPU, tiny, in Triton's interpreter

A stage that fails is noted and the next one runs, until the device is lost to an error that no later call
survives. `--stages 1,2,5` runs some; `--no-graphs` leaves out what records CUDA graphs.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

from benchmarks.smoke import capture, decoding, layers, machine, ops, tokens  # noqa: E402
from benchmarks.smoke.journal import Journal, Stage  # noqa: E402
from benchmarks.smoke.plan import Plan, dry  # noqa: E402

STAGES: dict[int, Stage] = {
    1: ("the machine", machine.look),
    2: ("each op once, against its reference", ops.check),
    3: ("a toy step captured and replayed", capture.replay),
    4: ("a tiny model under every switch", tokens.compare),
    5: ("a step of Qwen3-4B as a graph", decoding.replayed),
    6: ("the same without graphs, and the host's share", decoding.hosted),
    7: ("reading a prompt, beside SDPA", layers.prompts),
}


def main() -> int:
    """Run the stages; return 1 if something failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--stages", default=",".join(map(str, STAGES)))
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    plan = (dry if asked.dry_run else Plan)(graphs=not asked.no_graphs)
    journal = Journal(plan.device, asked.output)
    return journal.run({int(n): STAGES[int(n)] for n in asked.stages.split(",")}, plan)


if __name__ == "__main__":
    sys.exit(main())
