"""The report's figure of a lossless run: where drafted tokens were kept."""

from plotly.subplots import make_subplots

from sfi_traces.report.panel import MARGIN, Panel
from sfi_traces.views.acceptance import AXES, acceptance_of, caption
from sfi_traces.views.labels import WITHIN
from sfi_traces.views.view import View


def acceptance(view: View) -> Panel:
    """Draw a bar for each place in the sentence, and beside them one for each depth in the draft."""
    data = acceptance_of(view)
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.06)
    for column, (side, label) in enumerate(AXES.items(), 1):
        bars = data.sides[side]
        figure.add_bar(
            x=[bar.name for bar in bars], y=[bar.share for bar in bars],
            customdata=[bar.tested for bar in bars], marker={"color": WITHIN}, showlegend=False,
            hovertemplate="%{x}: %{y:.1%} of %{customdata} tested<extra></extra>", row=1, col=column,
        )  # fmt: skip
        figure.update_xaxes(title_text=label, type="category", row=1, col=column)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)
    figure.update_layout(height=340, margin=MARGIN)
    return Panel(caption(data), figure)
