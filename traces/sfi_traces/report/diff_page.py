"""Two traces as one HTML file: where they differ first, figures side by side, and numbers."""

from typing import Any

from sfi_core.errors import TraceError
from sfi_core.machine.text import printable
from sfi_traces.model.request import Request
from sfi_traces.report.page import page
from sfi_traces.views.captions import subject
from sfi_traces.views.diff_tables import numbers_table, overlap_tables, place_words
from sfi_traces.views.facts import Fact
from sfi_traces.views.table import Table

AROUND = 40  # tokens shown before the first difference, and after it
FIGURES = ("heatmap", "retained", "timeline")
NONE = "-"

Row = dict[str, Any]


def render_diff(first: Request, second: Request, document: Row) -> str:
    """Return the page of one request of two traces; `document` is the result of `compare`."""
    views = {"a": first, "b": second}
    (row,) = (one for one in document["requests"] if one["request"] == first.index)
    figures, missing = _figures(views)
    return page(
        "diff.html",
        ("page.js",),
        names={side: request.trace.path.resolve().name for side, request in views.items()},
        subjects={side: subject(request) for side, request in views.items()},
        cards=_cards(row, document),
        text=_text(views, row),
        names_of_figures=FIGURES,
        figures=figures,
        missing=missing,
        tables=_tables(document),
    )


def _figures(views: dict[str, Request]) -> tuple[dict[str, Row], dict[str, str]]:
    # by figure and side; and why some are missing
    from sfi_traces.report import step_figures  # noqa: PLC0415

    drawers = (step_figures.heatmap, step_figures.retained, step_figures.timeline)
    figures, missing = {}, {}
    for name, draw in zip(FIGURES, drawers, strict=True):
        for side, request in views.items():
            try:
                figures[f"{name}-{side}"] = draw(request).plain()
            except TraceError as error:
                missing[f"{name}-{side}"] = str(error)
    return figures, missing


def _cards(row: Row, document: Row) -> list[Fact]:
    at, layer = row["first_difference"], row["first_layer"]
    supports, speed = document["supports"], document["ratios"]["tokens_per_second"]
    known = row["equal_share"] is not None
    return [
        Fact("First other token", f"step {at['step']:,}" if at else "none" if known else NONE,
             f"{row['compared_steps']:,} steps compared" if known else "token ids were left out"),
        Fact("First other layer", f"layer {layer['layer']}" if layer else NONE,
             place_words(layer) if layer else "no support or selection of both differs"),
        Fact("Equal tokens", f"{row['equal_share']:.1%}" if known else NONE,
             f"of {min(row['steps'].values()):,} that both have"),
        Fact("Overlap of supports", f"{supports['overlap']['mean']:.3f}" if supports else NONE,
             "mean at equal steps" if supports else "record both with --audit N"),
        Fact("Speed", f"{speed:.2f}x" if speed else NONE, "tokens a second, B over A"),
    ]  # fmt: skip


def _text(views: dict[str, Request], row: Row) -> Row:
    first = row["first_difference"]
    if first is None:
        said = "No token differs." if row["equal_share"] is not None else "Token ids were left out."
        return {"note": said, "lines": []}
    lines = []
    for side, request in views.items():
        steps = request.steps
        at = int(steps.rows(first["step"]))
        begin = max(0, at - AROUND)
        lines.append(
            {
                "side": side.upper(),
                "step": int(steps.step[begin]),
                "before": printable("".join(steps.text[begin:at])),
                "token": printable(steps.text[at]) or f"id {first[side]['token_id']}",
                "after": printable("".join(steps.text[at + 1 : at + 1 + AROUND])),
                "about": f"step {first['step']}: {'slow' if steps.slow[at] else 'fast'}, "
                f"token {first[side]['token_id']}",
            }
        )
    return {"note": f"At step {first['step']:,}, marked.", "lines": lines}


def _tables(document: Row) -> list[Table]:
    settings = [(name, str(pair["a"]), str(pair["b"])) for name, pair in document["settings"].items()]
    changed = Table("Settings that differ", ("", "A", "B"), settings)
    return [numbers_table(document), *overlap_tables(document), changed]
