"""`sfi config list`: every setting with its type, default, range and meaning."""

from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.settings.complete import names
from sfi_cli.settings.tables import SETTINGS, places
from sfi_cli.settings.text import written
from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig

LEAST_WIDTH = 100  # of the table; a narrower one would break the meanings into single words
app = typer.Typer(help="Show the settings of --set and --config.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the settings of --set and --config."""


Prefix = Annotated[
    str, typer.Argument(help="Only names that begin with this: selector, t_.", autocompletion=names(SETTINGS))
]


@app.command("list")
def list_settings(prefix: Prefix = "", preset: o.Preset = None, json: o.Json = False) -> None:
    r"""List the settings that --set NAME=VALUE and a TOML file of --config take.

    The name of a setting in a table is TABLE.NAME; in a file it stands below [TABLE].

    For example:

      sfi config list

      sfi config list selector --preset released

      sfi generate --set selector.alpha=0.7 --set 'triggers=[".", "\n"]' --set engine.overlap=false
    """
    from sfi_cli.terminal.output import Output

    document = {"preset": preset, "settings": _rows(prefix, preset)}
    Output(json=json).data(document, _text)


def _rows(prefix: str, preset: str | None) -> list[dict[str, Any]]:
    # the settings whose names begin with `prefix`, in plain values
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


def _text(document: dict[str, Any]) -> str:
    # a table as wide as the terminal
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from sfi_cli.terminal.tables import plain_console, printed

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
