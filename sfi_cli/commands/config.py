"""`sfi config list` and `show`: every setting with its type, default, range, meaning and effective value."""

from itertools import groupby
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.settings import SETTINGS, effective_settings, places, written
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.tables import Part
from sfi_core.errors import ConfigError
from sfi_core.settings.config import toml_lines
from sfi_traces.views.table import Columns, Row, Table

TOP = "decoding"  # stands for the settings outside of tables
app = typer.Typer(help="Show the settings of --set and --config.", no_args_is_help=True)


@app.command("list")
def list_settings(
    prefix: Annotated[str, typer.Argument(help="A table, or the beginning of names: decoding, selector, t_.")] = "",
    json: o.Json = False,
) -> None:
    r"""List the settings that --set NAME=VALUE and a TOML file of --config take.

    The name of a setting in a table is TABLE.NAME; in a file it stands below [TABLE].

    For example:

      sfi config list

      sfi config list selector

      sfi generate --set selector.alpha=0.7 --set 'triggers=[".", "\n"]' --set engine.overlap=false
    """
    Output(json=json).data({"settings": _rows(prefix)}, _table if prefix else _overview)


@app.command("show")
def show_settings(preset: o.Preset = None, config: o.Config = None, sets: o.Sets = None, json: o.Json = False) -> None:
    """Show what a preset, a file and --set make of all settings, as TOML with the origin of each.

    For example:

      sfi config show --preset paper --config tuned.toml --set budget=128
    """
    output, values = Output(json=json), effective_settings(preset, config, sets)
    if json:
        rows = [{"name": name, "value": value, "origin": origin} for name, (value, origin) in values.items()]
        output.document({"settings": rows})
        return
    texts = []  # a table's lines together; those outside of tables come first
    for table, members in groupby(values, lambda name: name.rpartition(".")[0]):
        text = f"[{table}]\n" if table else ""
        for full in members:
            (value, origin), name = values[full], full.rpartition(".")[2]
            text += f"{toml_lines({name: value}).strip() or f'# {name} = none'}  # {origin}\n"
        texts.append(text)
    output.text("\n".join(texts))


def _rows(prefix: str) -> list[dict[str, Any]]:
    # the settings whose names begin with `prefix`, in plain values
    rows = [
        {
            "name": name, "type": declared.type, "default": declared.default, "range": declared.range,
            "choices": list(declared.choices), "meaning": declared.meaning, "commands": places(name),
        }
        for name, declared in SETTINGS.items()
        if name.startswith(prefix) or (prefix == TOP and "." not in name)
    ]  # fmt: skip
    if not rows:
        raise ConfigError(f"prefix must begin a setting's name, got {prefix!r}")
    return rows


def _overview(document: Row) -> list[Part]:
    # a row for each table, with the names in it
    names: dict[str, list[str]] = {}
    for row in document["settings"]:
        table, _, name = row["name"].rpartition(".")
        names.setdefault(table or TOP, []).append(name)
    rows = [(table, " ".join(members)) for table, members in names.items()]
    more = "sfi config list TABLE, or the beginning of a name, has defaults and meanings"
    return [Table("", (), [*rows, ("", ""), ("more", more)])]


def _table(document: Row) -> list[Part]:
    return [Table.of("", COLUMNS, document["settings"], left=4, spare=("range",))]


COLUMNS: Columns = {
    "setting": (str, "name"),
    "default": (written, "default"),
    "range": lambda row: ", ".join(filter(None, [row["range"]] if row["choices"] else [row["type"], row["range"]])),
    "meaning": (str, "meaning"),
}
