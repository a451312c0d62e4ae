"""`sfi config ...`: show the settings."""

import typer

from sfi_cli.commands.config.command import list_settings

app = typer.Typer(help="Show the settings of --set and --config.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the settings of --set and --config."""


app.command("list")(list_settings)
