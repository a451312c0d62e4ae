"""The report's figures of SyncKV's and FreeKV's observations, and of a lossless run's drafts."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.report.step_figures import LEGEND, Panel, axes, band, cells, draw_chance, panel
from sfi_traces.summary import similarity, supports
from sfi_traces.summary.facts import lossless_facts
from sfi_traces.views.captions import CLIP, WITHIN, Caption, layers_left_out, left_out, places, support
from sfi_traces.views.figure_data import SPREAD, HeadMap, axis_range
from sfi_traces.views.table import span

HEIGHT = 420  # of the two figures beside each other
BELOW, ROOM = 240, 80  # height of a plot below a map, and between them
MOST_NUMBERS = 64
DRAFTS = {  # titles of the axes
    "place": "place in the sentence; 0 is its first token",
    "depth": "depth in the draft; 1 is its first token",
}


def drift(request: Request) -> Panel:
    """Draw the mean over layers and KV heads, and its band."""
    step_S, overlap_US = similarity.drift(request.supports)
    mean, (low, high) = overlap_US.mean(0), np.quantile(overlap_US, SPREAD, axis=0)
    figure = go.Figure()
    band(figure, low, high, WITHIN, x=step_S)
    figure.add_scatter(
        x=step_S, y=mean, mode="lines", line={"color": WITHIN, "width": 2.5}, showlegend=False,
        hovertemplate="step %{x}: %{y:.3f}<extra></extra>",
    )  # fmt: skip
    chance = request.supports.chance
    draw_chance(figure, chance)
    figure.update_layout(
        height=HEIGHT,
        xaxis={"title": {"text": "decoding step"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "overlap"}, "range": axis_range(chance, low, high, mean)},
    )  # fmt: skip
    note = f"{support(request)}, {places(request.supports.places)}. Two random ones overlap by {chance:.3f}."
    if len(overlap_US) > 1:
        note += f" A point is over {len(overlap_US):,} of them; the band holds 10 to 90 %."
    note += left_out(request, request.supports)
    name = "Attention drift: overlap with the support of step 0, the prompt's"
    return panel(Caption(name, note), figure)


def head_similarity(request: Request) -> Panel:
    """Draw a cell for every two layers."""
    data = similarity.compare_heads([request.supports.thinned(similarity.MOST_COMPARED)])
    names = [f"layer {layer}" for layer in data["layers"]]
    matrix = data["matrix"]
    figure = go.Figure(
        go.Heatmap(
            z=matrix, x=names, y=names, colorscale="Viridis", xgap=1, ygap=1, hoverongaps=False,
            zmin=np.floor(10 * np.nanmin(matrix)) / 10, zmax=np.ceil(10 * np.nanmax(matrix)) / 10,
            colorbar={"thickness": 12, "outlinewidth": 0, "tickformat": ".2f"},
            texttemplate="%{z:.2f}" if matrix.size <= MOST_NUMBERS else None,
            hovertemplate="%{y}, %{x}<br>overlap %{z:.3f}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout({**axes(data["layers"]), "height": HEIGHT})
    note = (
        f"{support(request)}, {data['steps']:,} steps. Mean overlap of each KV head of a layer with those of "
        f"another at the same step, and on the diagonal with the others of its own. Within a layer "
        f"{data['within']:.3f}, between layers {data['between']:.3f}.{layers_left_out(request)}"
    )
    return panel(Caption("Similarity of heads, layer by layer", note), figure)


def query_cosine(request: Request) -> Panel:
    """Draw the map, and below it the lowest heads over time with FreeKV's thresholds."""
    request.trace.require_audit()
    data = supports.query_cosine(request)
    if data is None:
        raise TraceError(
            f"trace {request.trace.path} has no query cosine of request {request.index}: it needs an audited "
            "step after step 0; record it with --audit 1"
        )
    mean = HeadMap.of({(row["layer"], row["head"]): row["mean"] for row in data["heads"]})
    layout = axes(mean.heads)
    height = layout["height"] + BELOW
    share = layout["height"] / height
    figure = make_subplots(2, 1, row_heights=[share, 1 - share], vertical_spacing=ROOM / height)
    figure.add_trace(cells(mean, float(np.nanmin(mean.value)), 1, "cosine"), row=1, col=1)
    figure.update_traces(colorbar={"y": 1, "yanchor": "top", "len": share - ROOM / height})
    figure.update_layout(layout | {"height": height}, legend=LEGEND)
    for row in data["lowest"]:
        figure.add_scatter(
            x=np.array(row["steps"]), y=np.round(row["query_cosine"], 4), mode="lines",
            name=f"layer {row['layer']}, KV head {row['head']}", line={"width": 1.5}, row=2, col=1,
        )  # fmt: skip
    for tau in data["thresholds"]:
        line = {"dash": "dash", "color": CLIP}
        figure.add_hline(tau, line=line, annotation_text=f"tau {tau:g}", row=2, col=1)
    figure.update_xaxes(title_text="decoding step", row=2, col=1)
    shares = zip(data["thresholds"], data["below"], strict=True)
    under = " and ".join(f"{share:.1%} under {tau:g}" for tau, share in shares)
    note = (
        f"Mean over the query heads of a KV head, rotated queries. Of {data['n']:,} values, mean {data['mean']:.3f}, "
        f"{under}: where FreeKV would correct at this tau. The course is that of the lowest heads."
    )
    return panel(Caption("Query cosine with the step before", note), figure)


def acceptance(request: Request) -> Panel:
    """Draw a bar for each place in the sentence, and one for each depth in the draft.

    Raises `TraceError` for a plain run, or if no drafted token was tested.
    """
    facts = lossless_facts(request)
    if facts is None or not facts["tested"]:
        raise TraceError(
            f"trace {request.trace.path} has no drafted tokens of request {request.index}; record it with --lossless"
        )
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.06)
    for column, (name, label) in enumerate(DRAFTS.items(), 1):
        bars = facts[f"{name}s"]
        figure.add_bar(
            x=[span(bar[f"from_{name}"], bar[f"to_{name}"]) for bar in bars],
            y=[bar["acceptance"] for bar in bars], customdata=[bar["tested"] for bar in bars],
            marker={"color": WITHIN}, showlegend=False,
            hovertemplate="%{x}: %{y:.1%} of %{customdata} tested<extra></extra>", row=1, col=column,
        )  # fmt: skip
        figure.update_xaxes(title_text=label, type="category", row=1, col=column)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)
    figure.update_layout(height=340)
    note = (
        f"{facts['verifications']:,} verifications tested {facts['tested']:,} drafted tokens and kept "
        f"{facts['token_acceptance']:.1%} of them; each gave {facts['tokens_per_verification']:.2f} tokens "
        "on average. A token is tested if all before it in its draft were kept."
    )
    return panel(Caption("Drafted tokens that full attention kept", note), figure)
