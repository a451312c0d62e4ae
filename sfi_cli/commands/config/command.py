"""`sfi config list`: every setting with its type, default, range and meaning."""

from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.settings.complete import names
from sfi_cli.settings.tables import SETTINGS

Prefix = Annotated[
    str, typer.Argument(help="Only names that begin with this: selector, t_.", autocompletion=names(SETTINGS))
]  # fmt: skip


def list_settings(prefix: Prefix = "", preset: o.Preset = None, json: o.Json = False) -> None:
    r"""List the settings that --set NAME=VALUE and a TOML file of --config take.

    The name of a setting in a table is TABLE.NAME; in a file it stands below [TABLE].

    For example:

      sfi config list

      sfi config list selector --preset released

      sfi generate --set selector.alpha=0.7 --set 'triggers=[".", "\n"]' --set engine.overlap=false
    """
    from sfi_cli.commands.config.views import rows_of, settings_text
    from sfi_cli.terminal.output import Output

    document = {"preset": preset, "settings": rows_of(prefix, preset)}
    Output(json=json).data(document, settings_text)
