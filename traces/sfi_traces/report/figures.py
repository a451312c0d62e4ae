"""The report's figures, by Plotly."""

import html
import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.summary import similarity
from sfi_traces.summary import supports as observed
from sfi_traces.views import captions, figure_data
from sfi_traces.views.captions import ACROSS, CLIP, SLOW, WITHIN, Caption, visible

MARGIN = {"l": 8, "r": 8, "t": 12, "b": 8}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
MOST_NUMBERS, MOST_PAIRS = 8, 64  # columns of a map, and pairs of layers, with their number written in
MOST_BARS = 60  # beyond, error bars would hide each other
MOST_STEPS = 500  # of the heat map
MOST_LINES = 24
HEIGHT = 420  # of drift and similarity, which lie beside each other
BELOW, ROOM = 240, 80  # height of a plot below a map, and between them
Panel = dict[str, Any]


def panel(caption: Caption, figure: go.Figure) -> Panel:
    """Return what the page needs of a figure; its script sets the colors of text, paper and grid."""
    figure.update_layout(margin=MARGIN)
    plot = json.loads(figure.to_json())  # arrays as base64, which Plotly reads
    plot["layout"].pop("template", None)
    return {"caption": caption, **plot}


def grid(z: np.ndarray, x: list[str], y: list[str], ends: tuple[float, float], hover: str, **more: Any) -> go.Heatmap:
    """Draw a cell for each number of `z`, in colors between both `ends`."""
    return go.Heatmap(
        z=z, x=x, y=y, zmin=ends[0], zmax=ends[1], colorscale="Viridis", hoverongaps=False,
        hovertemplate=f"{hover}<extra></extra>",
        **{"colorbar": {"thickness": 12, "outlinewidth": 0, "tickformat": ".2f"}, "xgap": 1, "ygap": 1} | more,
    )  # fmt: skip


def cells(head_map: figure_data.HeadMap, low: float, word: str) -> go.Heatmap:
    """Draw a column for each layer, a row for each KV head; `word` names the number in the hover text."""
    return grid(
        head_map.value.T, [f"layer {layer}" for layer in head_map.layers], [f"head {head}" for head in head_map.heads],
        (low, 1), f"%{{x}}, KV %{{y}}<br>{word} %{{z:.4f}}",
        texttemplate="%{z:.3f}" if len(head_map.layers) <= MOST_NUMBERS else None,
    )  # fmt: skip


def axes(heads: list[int]) -> dict[str, Any]:
    """Return the layout of a figure whose first axes have the map."""
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    return {
        "height": min(600, max(240, 110 + 24 * len(heads))),
        "xaxis": axis,
        "yaxis": {**axis, "autorange": "reversed"},
    }


def retained(request: Request) -> Panel:
    """Draw a cell for each layer and KV head."""
    mass, steps = figure_data.retained_mass(request)
    shown = figure_data.HeadMap.of(mass)
    low = min(float(np.nanmin(shown.value)), 0.99)
    figure = go.Figure(cells(shown, low, "mass"))
    figure.update_layout(axes(shown.heads))
    return panel(captions.retained(mass, steps), figure)


def timeline(request: Request) -> Panel:
    """Draw the phases of each step, stacked."""
    data = figure_data.step_phases(request)
    figure = go.Figure()
    # stepped areas change midway between points; one more point at each end completes the outer bars
    middle = data.step + (data.per_bar - 1) / 2
    edge = 0.49 * data.per_bar
    at = np.concatenate([middle[:1] - edge, middle, middle[-1:] + edge])
    for name, spent_us in data.phases.items():
        figure.add_scatter(
            x=at, y=np.round(np.pad(spent_us, 1, mode="edge") / 1000, 4), name=name, stackgroup="phases",
            line={"width": 0, "shape": "hvh"}, fillcolor=figure_data.PHASES[name], hovertemplate="%{y:.3f} ms",
        )  # fmt: skip
    if len(data.slow) < len(data.step) * data.per_bar:
        total = np.sum([*data.phases.values()], axis=0) / 1000
        above = total[np.searchsorted(data.step, data.slow, side="right") - 1] + 0.03 * total.max()
        figure.add_scatter(
            x=data.slow, y=above, mode="markers", name="slow step", hoverinfo="skip",
            marker={"symbol": "triangle-down", "size": 8, "color": SLOW},
        )  # fmt: skip
    figure.update_layout(
        height=400, hovermode="x unified", legend=LEGEND,
        xaxis={
            "title": {"text": "decoding step"}, "showgrid": False, "range": [at[0], at[-1]],
            "hoverformat": ".0f", "unifiedhovertitle": {"text": "step %{x}"},
        },
        yaxis={"title": {"text": "milliseconds"}, "rangemode": "tozero"},
    )  # fmt: skip
    return panel(captions.timeline(data), figure)


def lambda_star(request: Request) -> Panel:
    """Draw the median, the spread over layers and KV heads, and the clip."""
    data = figure_data.lambda_over_time(request)
    few = len(data.step) <= MOST_BARS
    figure = go.Figure()
    figure.add_scatter(
        x=data.step, y=data.median, mode="markers" if few else "lines", name="median, 10 to 90 %",
        error_y={
            "array": data.high - data.median, "arrayminus": data.median - data.low, "symmetric": False,
            "thickness": 1.2, "width": 2,
        },
        line={"color": WITHIN}, hovertemplate="step %{x}: %{y:.5f}<extra></extra>",
    )  # fmt: skip
    label = f"clip at {data.clip:g}"
    figure.add_hline(data.clip, line={"dash": "dash", "color": CLIP}, annotation_text=label)
    figure.update_xaxes(title_text="decoding step")
    figure.update_yaxes(title_text="lambda*", range=[0, 1.15 * max(data.clip, data.high.max())])
    figure.update_layout(height=300)
    return panel(captions.lambda_star(data), figure)


def heatmap(request: Request) -> Panel:
    """Draw a cell for every two audited steps, labeled by step and token."""
    supports = request.supports.thinned(MOST_STEPS)
    rows = request.steps.rows(supports.step_N)
    labels = [
        html.escape(f"{step} {visible(request.steps.text[row])}".strip(), quote=False)
        for step, row in zip(supports.step_N, rows, strict=True)
    ]
    low, high = figure_data.color_range(supports.overlap)
    percent = np.round(100 * supports.overlap).astype(np.uint8)
    ends, hover = (100 * low, 100 * high), "%{y}<br>%{x}<br>overlap %{z} %"
    bar = {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0}
    figure = go.Figure(grid(percent, labels, labels, ends, hover, colorbar=bar, xgap=0, ygap=0))
    axis = {"type": "category", "showgrid": False, "tickfont": {"size": 10}, "ticks": ""}
    figure.update_layout(
        height=640,
        xaxis={**axis, "tickangle": -90},
        yaxis={**axis, "autorange": "reversed"},
        shapes=[_boundaries(request.steps.sentence[rows])],
    )
    return panel(captions.stability(request, supports), figure)


def _boundaries(sentence: np.ndarray) -> dict[str, object]:
    # lines cross the whole map; many lines only frame each sentence
    edges = [-0.5, *(np.flatnonzero(np.diff(sentence)) + 0.5).tolist(), len(sentence) - 0.5]
    path = ""
    for before, at, after in zip(edges, edges[1:], edges[2:], strict=False):
        begin, end = (edges[0], edges[-1]) if len(edges) <= MOST_LINES + 2 else (before, after)
        path += f"M{at},{begin}L{at},{end}M{begin},{at}L{end},{at}"
    return {"type": "path", "path": path or "M0,0", "line": {"color": "white", "width": 1}}


def lag(request: Request) -> Panel:
    """Draw the overlap of pairs within a sentence and across a boundary, and the number of pairs."""
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.78, 0.22], vertical_spacing=0.05)
    lines = figure_data.lag_lines(request)
    for line, color in zip(lines, (WITHIN, ACROSS), strict=True):
        same = {"legendgroup": line.name, "x": line.lag}
        band(figure, line.low, line.high, color, **same, row=1, col=1)
        figure.add_scatter(
            y=line.mean, mode="lines", name=f"{line.name}, mean {line.overall:.3f}",
            line={"color": color, "width": 2.5}, customdata=np.stack([line.low, line.high, line.pairs], 1),
            hovertemplate="%{y:.3f}, 10 to 90 %: %{customdata[0]:.3f} to %{customdata[1]:.3f}<extra></extra>",
            **same, row=1, col=1,
        )  # fmt: skip
        figure.add_scatter(
            y=line.pairs, mode="lines", name=line.name, line={"color": color, "width": 1.5}, showlegend=False,
            hovertemplate="%{y:,} pairs<extra></extra>", **same, row=2, col=1,
        )  # fmt: skip
    chance = request.supports.chance
    draw_chance(figure, chance, row=1, col=1)
    limits = figure_data.axis_range(chance, *(np.hstack([line.low, line.high, line.mean]) for line in lines))
    figure.update_yaxes(title_text="overlap", range=limits, row=1, col=1)
    figure.update_yaxes(title_text="pairs", rangemode="tozero", nticks=3, row=2, col=1)
    figure.update_xaxes(title_text="steps apart", rangemode="tozero", row=2, col=1)
    figure.update_layout(height=360, hovermode="x", legend=LEGEND)
    return panel(captions.lag(request), figure)


def draw_chance(figure: go.Figure, chance: float, **place: int) -> None:
    """Draw the overlap of two random supports as a line across a figure."""
    figure.add_hline(chance, line={"dash": "dash", "color": CLIP}, annotation_text="two random supports", **place)


def band(figure: go.Figure, low: np.ndarray, high: np.ndarray, color: str, **more: Any) -> None:
    """Fill what is between two lines with a color `#rrggbb`, made transparent."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, **more}
    figure.add_scatter(y=low, **edge)
    figure.add_scatter(y=high, fill="tonexty", fillcolor=f"rgba({red}, {green}, {blue}, 0.18)", **edge)


def drift(request: Request) -> Panel:
    """Draw the mean over layers and KV heads, and its band."""
    step_S, overlap_US = similarity.drift(request.supports)
    mean, (low, high) = overlap_US.mean(0), np.quantile(overlap_US, figure_data.SPREAD, axis=0)
    figure = go.Figure()
    band(figure, low, high, WITHIN, x=step_S)
    figure.add_scatter(
        x=step_S, y=mean, mode="lines", line={"color": WITHIN, "width": 2.5}, showlegend=False,
        hovertemplate="step %{x}: %{y:.3f}<extra></extra>",
    )  # fmt: skip
    chance = request.supports.chance
    draw_chance(figure, chance)
    figure.update_xaxes(title_text="decoding step", rangemode="tozero")
    figure.update_yaxes(title_text="overlap", range=figure_data.axis_range(chance, low, high, mean))
    figure.update_layout(height=HEIGHT)
    note = f"{captions.support(request)}, {captions.places(request.supports.places)}."
    note += f" Two random ones overlap by {chance:.3f}."
    if len(overlap_US) > 1:
        note += f" A point is over {len(overlap_US):,} of them; the band holds 10 to 90 %."
    note += captions.left_out(request, request.supports)
    name = "Attention drift: overlap with the support of step 0, the prompt's"
    return panel(Caption(name, note), figure)


def head_similarity(request: Request) -> Panel:
    """Draw a cell for every two layers."""
    data = similarity.compare_heads([request.supports.thinned(similarity.MOST_COMPARED)])
    names = [f"layer {layer}" for layer in data["layers"]]
    matrix = data["matrix"]
    ends = float(np.floor(10 * np.nanmin(matrix)) / 10), float(np.ceil(10 * np.nanmax(matrix)) / 10)
    text = "%{z:.2f}" if matrix.size <= MOST_PAIRS else None
    figure = go.Figure(grid(matrix, names, names, ends, "%{y}, %{x}<br>overlap %{z:.3f}", texttemplate=text))
    figure.update_layout({**axes(data["layers"]), "height": HEIGHT})
    note = (
        f"{captions.support(request)}, {data['steps']:,} steps. Mean overlap of each KV head of a layer with those of "
        f"another at the same step, and on the diagonal with the others of its own. Within a layer "
        f"{data['within']:.3f}, between layers {data['between']:.3f}.{captions.layers_left_out(request)}"
    )
    return panel(Caption("Similarity of heads, layer by layer", note), figure)


def query_cosine(request: Request) -> Panel:
    """Draw the map, and below it the lowest heads over time with FreeKV's thresholds."""
    request.trace.require_audit()
    data = observed.query_cosine(request)
    if data is None:
        raise TraceError(
            f"trace {request.trace.path} has no query cosine of request {request.index}: it needs an audited "
            "step after step 0; record it with --audit 1"
        )
    mean = figure_data.HeadMap.of({(row["layer"], row["head"]): row["mean"] for row in data["heads"]})
    layout = axes(mean.heads)
    height = layout["height"] + BELOW
    share = layout["height"] / height
    figure = make_subplots(2, 1, row_heights=[share, 1 - share], vertical_spacing=ROOM / height)
    figure.add_trace(cells(mean, float(np.nanmin(mean.value)), "cosine"), row=1, col=1)
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
