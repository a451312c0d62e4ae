"""One request's settings: vLLM's `extra_args`, over HTTP `vllm_xargs`, with names `sfi.*`."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.machine.text import printable, shown
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.fields import require

PREFIX = "sfi."
ENABLED = "enabled"
# what decides when a step is slow; everything else is the same for all rows of a batch
OWN = ("trigger_policy", "t_max", "min_gap", "trigger_delay", "slow_start", "stride", "random_rate")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSettings:
    """How one request is to be decoded.

    `config` is the server's but for `OWN`; a request that is not `enabled` runs dense, and so does one whose
    settings have an `error`.
    """

    config: SfiConfig
    enabled: bool = True
    error: str = ""

    @classmethod
    def of(
        cls, extra: Mapping[str, Any] | None, config: SfiConfig, check: Callable[[SfiConfig], None]
    ) -> "RequestSettings":
        """Read a request's settings from its `extra_args`, over the server's `config`.

        A mistake goes into `error`: a scheduler cannot refuse a request, and an exception there ends the
        server. `check` raises ConfigError for settings that cannot run on this server.
        """
        try:
            given = {str(name): value for name, value in (extra or {}).items()}
            own = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
            enabled = own.pop(ENABLED, True)
            told = isinstance(enabled, int) and enabled in {True, False}
            require(told, f"{PREFIX}{ENABLED} must be 0 or 1, got {shown(enabled)}")
            check_own(own)
            wanted = config.replace(**own)
            if own:
                check(wanted)
            return cls(wanted, bool(enabled))
        except ConfigError as error:
            return cls(config, enabled=False, error=printable(str(error)))
        except Exception as error:  # noqa: BLE001 - it would end the server, and is one client's
            return cls(config, enabled=False, error=f"settings must be numbers, got {type(error).__name__}")

    def salt(self, policy: str) -> str:
        """Return a name for all that the keys and values of generated tokens depend on."""
        facts = {"policy": policy, **self.config.to_dict()} if self.enabled else {}
        text = json.dumps(facts, sort_keys=True)
        return "sfi-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def check_own(own: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings that a request cannot have."""
    for name in sorted(own.keys() - set(OWN)):
        wrong = shown(f"{PREFIX}{name}")[1:-1]
        raise ConfigError(f"{wrong} is no setting of one request; expected one of {(ENABLED, *OWN)}")
