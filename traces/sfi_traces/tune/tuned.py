"""The file that a tuning writes: settings for `--config`, and their provenance."""

import json
import math
from collections.abc import Mapping
from typing import Any

from sfi_core.settings.config import SfiConfig
from sfi_traces.replay import Setting
from sfi_traces.tune.trigger_sets import NamedSet


def tuned_config(setting: Setting, chosen: NamedSet | None) -> SfiConfig:
    """Return the config to run: a set of strings as strings, a mined one as token ids."""
    if chosen is None or setting.policy != "boundary":
        return setting.config
    if chosen.strings is not None:
        return setting.config.replace(triggers=chosen.strings, trigger_token_ids=None)
    return setting.config.replace(trigger_token_ids=sorted(chosen.token_ids))


def tuned_toml(config: SfiConfig, provenance: Mapping[str, Any]) -> str:
    """Write settings for `--config`, with their provenance in a table that `--config` skips."""
    return config.to_toml() + _tables("provenance", provenance)


def _tables(name: str, values: Mapping[str, Any], *, row: bool = False) -> str:
    # TOML has no null, and plain keys must come before tables
    known = {key: value for key, value in values.items() if _told(value)}
    plain = {k: v for k, v in known.items() if not isinstance(v, Mapping) and not _rows(v)}
    heading = f"[[{name}]]" if row else f"[{name}]"
    text = "".join(f"{line}\n" for line in ("", heading, *map(_line, plain.items())))
    for key, value in known.items():
        if isinstance(value, Mapping):
            text += _tables(f"{name}.{key}", value)
        elif _rows(value):
            text += "".join(_tables(f"{name}.{key}", each, row=True) for each in value)
    return text


def _line(pair: tuple[str, Any]) -> str:
    # JSON's strings, numbers, booleans and arrays are valid TOML, except for a bare DEL
    return f"{pair[0]} = {json.dumps(pair[1], ensure_ascii=False)}".replace("\x7f", "\\u007f")


def _told(value: Any) -> bool:
    return value not in (None, {}) and not (isinstance(value, float) and not math.isfinite(value))


def _rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
