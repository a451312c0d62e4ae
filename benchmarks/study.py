"""The study behind docs/evidence.md: what slow-fast decoding does to a pretrained language model.

    python benchmarks/study.py fidelity --table front --windows 0:2 &   two processes, each with its windows
    python benchmarks/study.py fidelity --table front --windows 2:4
    python benchmarks/study.py report                                   tables and figures in docs/evidence

Rows go to benchmarks/results/evidence, a file a part. A row that is there is not made again, so a part that
was stopped goes on where it was, and a method that methods.toml gains gets only its own rows.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is first imported
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

from benchmarks.study.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(__doc__ or ""))
