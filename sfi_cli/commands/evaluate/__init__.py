"""`sfi eval`: the defaults of its options, as a results folder keeps them."""

from typing import Any

from sfi_cli.settings import settings_for
from sfi_core.settings.policy_names import built_in

APART = ("full-kv", "sfi", "prior-only")  # the last is the ablation of a part of sfi
METHODS = ("full-kv", "sfi", "sfi@paper", "sfi@released", *(name for name in built_in() if name not in APART))
DEFAULTS: dict[str, Any] = {
    "model": None, "dtype": "auto", "methods": list(METHODS),
    "shares": [0.05, 0.1, 0.15, 0.25], "recent": 128, "tasks": None, "lengths": [1024, 4096],
    "samples": 20, "seed": 0, "fidelity": None, "tokens": 128,
    **{name.rpartition(".")[2]: setting.default for name, setting in settings_for("eval").items()},
}  # fmt: skip


def shown(value: Any) -> str:
    """Write an option's value as on the command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
