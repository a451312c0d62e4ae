"""`sfi trace export`: a trace for other programs."""

from typing import Annotated

from sfi_cli import options as o


def export(
    folder: o.TraceDir,
    form: Annotated[str, o.option(o.OUTPUT, "perfetto, csv or jsonl.", "--format")],
    table: Annotated[
        str | None, o.option(o.OUTPUT, "Only this table, of csv and jsonl.", shown="all")
    ] = None,
    output: o.OutputPath = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> None:
    """Write a trace as a timeline for ui.perfetto.dev, or as CSV or JSON lines.

    Without --table, each table is a file in a folder; a list is written as JSON. A file that ends in .gz is
    compressed; ui.perfetto.dev opens such a file.

    For example:

      sfi trace export run --format perfetto -o timeline.json.gz

      sfi trace export run --format csv -o tables

      sfi trace export run --format jsonl --table steps
    """
    from sfi_cli.commands.trace.export_job import ExportJob

    ExportJob(form=form, table=table, output=output, force=force, quiet=quiet).run(folder)
