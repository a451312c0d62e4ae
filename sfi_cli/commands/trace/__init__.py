"""`sfi trace ...`: record once, then look at it from every side."""

import typer

from sfi_cli.commands.trace import check, diff, export, importing, plot, record, report, show, sql
from sfi_cli.commands.trace.replay.command import replay
from sfi_cli.settings.moved import Command

app = typer.Typer(help="Record what the model attended to, and look at it.", no_args_is_help=True)
app.command()(check.check)
app.command()(diff.diff)
app.command()(export.export)
app.command("import")(importing.import_)
app.command()(plot.plot)
app.command(cls=Command)(record.record)
app.command(cls=Command)(replay)
app.command()(report.report)
app.command()(show.show)
app.command()(sql.sql)
