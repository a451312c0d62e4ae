"""The names of all policies; importing none, so that help and completion stay quick.

Ours are the files of `sfi_core/policies/built_in`. Those of other packages are entry points in the group
`sfi.policies`: the name is the policy's, the value a subclass of `Policy`. Example: docs/your_policy.md.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "policies" / "built_in"
GROUP = "sfi.policies"


@cache
def built_in() -> tuple[str, ...]:
    """List our own policies."""
    return tuple(sorted(path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py")))


@cache
def installed() -> tuple[EntryPoint, ...]:
    """List the policies of other packages."""
    return tuple(entry_points(group=GROUP))


def default_policy(*, lossless: bool) -> str:
    """Name the policy of a run that names none; docs/lossless.md has the share of drafts that each policy keeps."""
    return "codescan" if lossless else "sfi"


def known() -> tuple[str, ...]:
    """List all policies."""
    return (*built_in(), *sorted({point.name for point in installed()}))


def package_of(point: EntryPoint) -> str:
    """Name the package that an entry point belongs to."""
    return point.dist.name if point.dist is not None else point.module
