"""Policies of other packages, found by their entry points in the group `sfi.policies`.

The entry point's name is the policy's name, its value a subclass of `Policy`. Example: docs/your_policy.md.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Policy

GROUP = "sfi.policies"


@cache
def installed() -> tuple[EntryPoint, ...]:
    """List the installed entry points without importing them."""
    return tuple(entry_points(group=GROUP))


def package_of(point: EntryPoint) -> str:
    """Name the package that an entry point belongs to."""
    return point.dist.name if point.dist is not None else point.module


def import_policy(point: EntryPoint) -> type[Policy]:
    """Import the policy of an entry point; raises `ConfigError` if that fails or it is no policy."""
    where = f"policy {point.name!r} of package {package_of(point)}"
    try:
        found = point.load()
    except Exception as error:  # another package may raise anything at import
        reason = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(
            f"{where} cannot be imported: {type(error).__name__}: {reason}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"{where} must be a subclass of sfi_core.policies.Policy, got {found!r}")
    return found
