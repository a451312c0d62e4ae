"""`sfi trace ...`: record a run, and analyze the recording."""

import typer

from sfi_cli.commands.trace import check, diff, export, importing, record, report, show
from sfi_cli.commands.trace.replay import replay

app = typer.Typer(help="Record what the model attended to, and look at it.", no_args_is_help=True)
app.command()(check.check)
app.command()(diff.diff)
app.command()(export.export)
app.command("import")(importing.import_)
app.command()(report.plot)
app.command()(record.record)
app.command()(replay)
app.command()(report.report)
app.command()(show.show)
app.command()(export.sql)
