"""Policies of other packages, found by their entry points in the group `sfi.policies`.

An entry point's name is the policy's name, its value a subclass of `Policy`; docs/your_policy.md shows one.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Policy

GROUP = "sfi.policies"


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of this process' environment; nothing of them is imported."""
    return tuple(entry_points(group=GROUP))


def package_of(point: EntryPoint) -> str:
    """Name the package that an entry point belongs to."""
    return point.dist.name if point.dist is not None else point.module


def outside_policy(name: str) -> type[Policy] | None:
    """Import the policy of that name; None where no package has one.

    Raises:
        ConfigError: Two packages have it, it does not import, or it is no policy.
    """
    points = [point for point in installed() if point.name == name]
    if not points:
        return None
    if len(points) > 1:
        raise taken_twice(name, [f"package {package_of(point)}" for point in points])
    where = f"policy {name!r} of package {package_of(points[0])}"
    try:
        found = points[0].load()
    except Exception as error:  # whatever another package raises at import
        reason = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(
            f"{where} cannot be imported: {type(error).__name__}: {reason}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"{where} must be a subclass of sfi_core.policies.Policy, got {found!r}")
    return found


def taken_twice(name: str, owners: list[str]) -> ConfigError:
    """Say that a name is ambiguous: which policy would run must not depend on an installation's order."""
    return ConfigError(
        f"policy {name!r} is defined twice, by {' and by '.join(owners)}; remove one"
    )
