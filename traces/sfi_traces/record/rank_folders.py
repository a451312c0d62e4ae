"""Where the ranks of one run write: the first into the trace's folder, each other into one inside it."""

import re
from pathlib import Path

from sfi_traces.schema import RANK


def rank_folder(folder: Path, rank: int) -> Path:
    """Return where a rank's trace goes."""
    return folder / RANK.format(number=rank) if rank else folder


def rank_folders(folder: Path) -> dict[int, Path]:
    """Find the folders of the ranks but the first, by rank; each may or may not hold a trace."""
    named = ((re.fullmatch(r"rank-(\d{5,})", path.name), path) for path in folder.glob("rank-*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))
