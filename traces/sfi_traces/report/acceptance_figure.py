"""The report's figure of a lossless run: the share of drafted tokens that was kept."""

from plotly.subplots import make_subplots

from sfi_core.errors import TraceError
from sfi_traces.report.panel import MARGIN, Panel, span
from sfi_traces.summary.lossless import lossless_facts
from sfi_traces.views.captions import Caption
from sfi_traces.views.labels import WITHIN
from sfi_traces.views.view import View

AXES = {  # axis titles
    "place": "place in the sentence; 0 is its first token",
    "depth": "depth in the draft; 1 is its first token",
}


def acceptance(view: View) -> Panel:
    """Draw a bar for each place in the sentence, and one for each depth in the draft.

    Raises:
        TraceError: The run was plain, or no drafted token was tested.
    """
    found = lossless_facts(view.scope)
    if found is None or not found["tested"]:
        raise TraceError(
            f"trace {view.trace.path} has no drafted tokens of request {view.request}; record it with "
            "--lossless"
        )
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.06)
    for column, (name, label) in enumerate(AXES.items(), 1):
        bars = found[f"{name}s"]
        figure.add_bar(
            x=[span(bar[f"from_{name}"], bar[f"to_{name}"]) for bar in bars],
            y=[bar["acceptance"] for bar in bars], customdata=[bar["tested"] for bar in bars],
            marker={"color": WITHIN}, showlegend=False,
            hovertemplate="%{x}: %{y:.1%} of %{customdata} tested<extra></extra>", row=1, col=column,
        )  # fmt: skip
        figure.update_xaxes(title_text=label, type="category", row=1, col=column)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)
    figure.update_layout(height=340, margin=MARGIN)
    note = (
        f"{found['verifications']:,} verifications tested {found['tested']:,} drafted tokens and kept "
        f"{found['token_acceptance']:.1%} of them; each gave {found['tokens_per_verification']:.2f} tokens "
        "on average. A token is tested if all before it in its draft were kept."
    )
    return Panel(Caption("Drafted tokens that full attention kept", note), figure)
