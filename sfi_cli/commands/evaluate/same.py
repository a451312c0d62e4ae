"""Checks that a resumed run has the model, text and methods of its results folder."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sfi_core.errors import ConfigError

SHOWN = 3  # differences named in the message
Facts = Mapping[str, Any]


def check_same(what: str, got: Any, wanted: Any, versions: tuple[Facts, Facts]) -> None:
    """Refuse to resume a folder whose facts are not this run's.

    Args:
        what: The name of the facts in the manifest: model, text or methods.
        got: The facts of this run.
        wanted: The folder's facts.
        versions: The versions of this run and of the folder; the message names them if they differ.

    Raises:
        ConfigError: The facts differ; the message names the first `SHOWN` differences.
    """
    one, other = dict(_leaves(got)), dict(_leaves(wanted))
    names = [name for name in other | one if one.get(name) != other.get(name)]
    if not names:
        return
    kept, found = (
        ", ".join(f"{name} {_shown(name, facts)}".strip() for name in names[:SHOWN])
        for facts in (other, one)
    )
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    ours, theirs = (facts.get("sfi") for facts in versions)
    since = f"; the folder is of sfi {theirs}, this is {ours}" if ours != theirs else ""
    raise ConfigError(
        f"resume must keep the folder's {what} {kept}{more}, got {found}{more}{since}"
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    # each plain value by its path; in a list of methods a method's label is the part of the path
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and all(
        isinstance(one, Mapping) and "label" in one for one in value
    ):
        for number, one in enumerate(value):
            yield f"{path}{number}", one["label"]
            yield from _leaves(one, f"{path}.{one['label']}" if path else one["label"])
    else:
        yield path, value


def _shown(name: str, facts: Mapping[str, Any]) -> str:
    return json.dumps(facts[name]) if name in facts else "absent"
