"""Decoding policies: which past tokens each KV head reads, and when it selects them anew."""

from importlib import import_module

from sfi_core.errors import ConfigError, unknown
from sfi_core.policies.base import Companion, Evidence, EvidencePolicy, LayerContext, Policy, Selection, Triggered, best
from sfi_core.settings.policy_names import built_in, installed, known, package_of

__all__ = [
    "POLICIES",
    "Companion",
    "Evidence",
    "EvidencePolicy",
    "LayerContext",
    "Policy",
    "Selection",
    "Triggered",
    "best",
    "policy_class",
]


def _own(name: str) -> type[Policy]:
    # the class of a file in `built_in`: the only policy that the file itself defines
    module = import_module(f"{__name__}.built_in.{name.replace('-', '_')}")
    policies = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Policy)]
    return next(policy for policy in policies if policy.__module__ == module.__name__)


POLICIES: dict[str, type[Policy]] = {name: _own(name) for name in built_in()}


def policy_class(name: str) -> type[Policy]:
    """Look a policy up, ours or a package's; raise `ConfigError` for none, two, or one that cannot be imported."""
    points = [point for point in installed() if point.name == name]
    owners = ["sfi"] if name in POLICIES else []
    owners += [f"package {package_of(point)}" for point in points]
    if len(owners) > 1:
        raise ConfigError(f"policy {name!r} is defined twice, by {' and by '.join(owners)}; remove one")
    if not owners:
        raise unknown("policy", name, known())
    if not points:
        return POLICIES[name]
    where = f"policy {name!r} of {owners[0]}"
    try:
        policy = points[0].load()
    except Exception as error:  # another package may raise anything at import
        reason = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {reason}") from error
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigError(f"{where} must be a subclass of sfi_core.policies.Policy, got {policy!r}")
    return policy
