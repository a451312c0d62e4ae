"""Checks that a resumed run has the model, text and methods of its results folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.machine.versions import versions

SHOWN = 3  # differences named in the message
Facts = Mapping[str, Any]


def check_same(facts: Facts, manifest: Facts, names: Sequence[str]) -> None:
    """Raise `ConfigError` with the first differences if facts of these names are not those of the folder."""
    for what in names:
        one, other = (dict(_leaves(_labeled(given[what]))) for given in (facts, manifest))
        differ = [name for name in other | one if one.get(name) != other.get(name)]
        if differ:
            kept, found = (
                ", ".join(f"{name} {_shown(name, leaves)}".strip() for name in differ[:SHOWN])
                for leaves in (other, one)
            )
            more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
            ours, theirs = versions().get("sfi"), manifest["versions"].get("sfi")
            since = f"; the folder is of sfi {theirs}, this is {ours}" if ours != theirs else ""
            raise ConfigError(f"resume must keep the folder's {what} {kept}{more}, got {found}{more}{since}")


def _labeled(value: Any) -> Any:
    # a list of methods by their labels, with their order
    if not isinstance(value, list):
        return value
    order = {str(number): one["label"] for number, one in enumerate(value)}
    return order | {one["label"]: one for one in value}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    # each plain value by its path
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _shown(name: str, facts: Facts) -> str:
    return json.dumps(facts[name]) if name in facts else "absent"
