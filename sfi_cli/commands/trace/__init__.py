"""`sfi trace ...`: record once, then look at it from every side."""

import typer

from sfi_cli.commands.trace import record

app = typer.Typer(
    help="Record what the model attended to, and look at it.",
    no_args_is_help=True,
)
app.command()(record.record)
