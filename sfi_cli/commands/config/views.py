"""The settings as rows, and as a table."""

from shutil import get_terminal_size
from typing import Any

from sfi_cli.settings.tables import SETTINGS, places
from sfi_cli.settings.text import written
from sfi_cli.terminal.tables import plain_console, printed
from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig

LEAST_WIDTH = 100  # of the table; a narrower one would break the meanings into single words


def rows_of(prefix: str, preset: str | None) -> list[dict[str, Any]]:
    """Describe the settings whose names begin with `prefix`, in plain values.

    Raises:
        ConfigError: No setting's name begins so, or the preset is unknown.
    """
    config = SfiConfig() if preset is None else SfiConfig.preset(preset)
    values = config.to_dict()
    found = []
    for name, one in SETTINGS.items():
        if name.startswith(prefix):
            table, _, field = name.rpartition(".")
            own = values.get(table, {}) if table else values
            row = {
                "name": name, "type": one.type, "default": one.default, "range": one.range,
                "choices": list(one.choices), "meaning": one.meaning,
                "commands": places(name),
            }  # fmt: skip
            found.append(row | ({"value": own.get(field, one.default)} if preset else {}))
    if not found:
        raise ConfigError(f"prefix must begin a setting's name, got {prefix!r}")
    return found


def settings_text(document: dict[str, Any]) -> str:
    """Return the settings as a table as wide as the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    preset = document["preset"]
    table = Table(box=SIMPLE_HEAD)
    for heading, most in (("setting", None), (preset or "default", 20), ("type and range", 20)):
        table.add_column(heading, max_width=most, no_wrap=most is None)
    table.add_column("meaning")
    for row in document["settings"]:
        value = written(row["value"] if preset else row["default"])
        limits = [row["range"]] if row["choices"] else [row["type"], row["range"]]
        table.add_row(row["name"], value, ", ".join(filter(None, limits)), row["meaning"])
    console = plain_console(max(LEAST_WIDTH, get_terminal_size().columns))
    return printed(console, [table])
