"""The report's support raster of every audited layer and KV head, shown one at a time."""

import base64
from math import sqrt

import numpy as np
import plotly.graph_objects as go

from sfi_traces.model.request import Request
from sfi_traces.report.step_figures import LEGEND, MARGIN, Panel
from sfi_traces.views import captions
from sfi_traces.views.captions import RASTER, SEGMENT, SLOW, visible
from sfi_traces.views.raster import MISSED, READ, Raster, choose_place, meaning, rasters

MOST_STEPS, MOST_CELLS = 600, 400
ALL_CELLS = 16_000_000  # of all layers and heads; 5 MB at four to a byte
LONGEST = 60  # characters of a cell's text


def raster(request: Request) -> Panel:
    """Draw steps to the right and positions upward; the page's script fills in the cells."""
    places = request.supports.places
    first, why = choose_place(request)
    shrink = min(1.0, sqrt(ALL_CELLS / (MOST_STEPS * MOST_CELLS * len(places))))
    found = rasters(request, places, most_steps=int(shrink * MOST_STEPS), most_cells=int(shrink * MOST_CELLS))
    shown = found[places.index(first)]
    more = {
        "choices": [
            {"layer": layer, "head": head, "cells": pack(one.cells), "words": meaning(one)}
            for (layer, head), one in zip(places, found, strict=True)
        ],
        "chosen": places.index(first),
        "shape": shown.cells.shape,
        "perCell": shown.per_cell,
        "texts": _texts(request, shown),
        "slow": shown.slow.tolist(),
    }
    words = {kind: text for one in found for kind, text in meaning(one).items()}
    return Panel(captions.raster(request, shown, why), _figure(shown, words), more)


def pack(cells: np.ndarray) -> str:
    """Pack four cells, each 0 to 3, into a byte, the first in the lowest bits; base64."""
    four = np.pad(cells.ravel(), (0, -cells.size % 4)).reshape(-1, 4)
    packed = (four << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1, dtype=np.uint8)
    return base64.b64encode(packed.tobytes()).decode()


def _figure(shown: Raster, words: dict[int, str]) -> go.Figure:
    shades = ["rgba(0, 0, 0, 0)", *RASTER.values()]
    scale = [[(kind + end) / len(shades), shade] for kind, shade in enumerate(shades) for end in (0, 1)]
    figure = go.Figure(
        go.Heatmap(
            x=shown.step_N, y0=(shown.per_cell - 1) / 2, dy=shown.per_cell, zmin=-0.5, zmax=len(shades) - 0.5,
            colorscale=scale, showscale=False, hoverinfo="none",
        )
    )  # fmt: skip
    for kind, text in sorted(words.items(), key=lambda item: (READ, MISSED).count(item[0]), reverse=True):
        marker = {"symbol": "square", "size": 10, "color": RASTER[kind]}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=text, marker=marker)
    same = {"mode": "lines", "hoverinfo": "skip"}
    if shown.recent is not None:
        line = {"color": SEGMENT, "width": 1.2, "shape": "hvh"}
        name = "end of the sink, start of the recent"
        figure.add_scatter(x=shown.step_N, y=shown.recent - 0.5, name=name, line=line, **same)
        figure.add_hline(shown.sink - 0.5, line={"color": SEGMENT, "width": 1.2})
    end = {"color": "#8a94a0", "width": 1, "shape": "hvh"}
    figure.add_scatter(x=shown.step_N, y=shown.context - 0.5, name="end of the context", line=end, **same)
    if not shown.slow.all():
        figure.add_scatter(
            x=shown.step_N[shown.slow], y=np.full(shown.slow.sum(), -0.5), mode="markers", name="slow step",
            marker={"symbol": "triangle-up", "size": 8, "color": SLOW}, cliponaxis=False, hoverinfo="skip",
        )  # fmt: skip
    high = shown.cells.shape[0] * shown.per_cell
    figure.update_layout(
        height=460, margin=MARGIN, legend=LEGEND,
        xaxis={
            "title": {"text": "decoding step"}, "showgrid": False, "zeroline": False,
            "range": [shown.step_N[0] - 0.5, shown.step_N[-1] + 0.5],
        },
        yaxis={
            "title": {"text": "position"}, "showgrid": False, "zeroline": False, "range": [-0.5, high - 0.5],
        },
    )  # fmt: skip
    return figure


def _texts(request: Request, shown: Raster) -> list[str]:
    # the text at each cell's positions; empty in a redacted trace
    tokens = request.words
    if not any(tokens):
        return []
    starts = range(0, shown.cells.shape[0] * shown.per_cell, shown.per_cell)
    return [visible("".join(tokens[at : at + shown.per_cell]), LONGEST) for at in starts]
