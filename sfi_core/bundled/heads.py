"""The head clusters of the bundled checkpoint, which `sfi tune heads` made."""

from pathlib import Path

FILE = Path(__file__).parent / "heads.json"


def bundled_heads() -> Path:
    """Return the head file of the bundled checkpoint, for `HeadClusters.load`."""
    return FILE
