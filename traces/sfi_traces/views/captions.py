"""Titles, notes, colors and token labels of the figures, shared by `sfi trace plot` and `sfi trace report`."""

import itertools
from typing import Final, NamedTuple

import numpy as np

from sfi_core.machine.text import printable
from sfi_traces.model.request import Request
from sfi_traces.model.steps import Steps
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Place
from sfi_traces.views.figure_data import MOST_LAG, REST, Lambda, Retained, Timeline
from sfi_traces.views.raster import MISSED, READ, SELECTED, Raster


class Caption(NamedTuple):
    """A figure's title, and the note that explains it."""

    title: str
    note: str


def subject(request: Request) -> str:
    """Describe the run of a figure."""
    manifest, steps = request.trace.manifest, request.steps
    prompt = int(steps.context[0] - steps.step[0])
    words = [
        manifest["model"]["name"],
        f"policy {manifest['policy']}{', lossless' if request.trace.lossless else ''}",
        f"request {request.index}",
        f"{prompt:,} prompt tokens",
        f"{len(steps):,} steps",
    ]
    if manifest["finished"] is None:
        words.append("killed")
    return ", ".join(words)


def support(request: Request, top: int) -> str:
    """Describe supports of `top` positions; an import may have an indexer's selections instead."""
    imported = request.trace.imported
    if imported and imported["kind"] == "selections":
        return f"Imported selections of up to {top} positions"
    return f"Top-{top} of dense attention"


def stability(request: Request, shown: Supports) -> Caption:
    """Caption the heat map of the steps in `shown`."""
    whole = request.supports
    note = f"{support(request, request.k)}, {places(whole.places)}."
    if not any(request.steps.text):
        note += " Axes: steps."
    else:
        note += " Axes: the generated text."
    note += " Lines: sentence boundaries."
    return Caption("Support overlap of every two steps", note + left_out(request, whole, shown))


def lag(request: Request) -> Caption:
    """Caption the overlap by lag."""
    note = (
        f"{support(request, request.k)}, {places(request.supports.places)}. Pairs of audited steps up to "
        f"{MOST_LAG} steps apart; bands hold 10 to 90 % of them. Two random ones overlap by "
        f"{request.supports.chance:.3f}.{layers_left_out(request)}"
    )
    return Caption("Support overlap by lag, within a sentence and across a boundary", note)


def raster(request: Request, shown: Raster, why: str) -> Caption:
    """Caption a support raster; `why` says what is special about its layer and KV head, if anything."""
    note = f"{support(request, shown.top)}."
    if why:
        note += f" In {places([shown.place])} {why}."
    if shown.per_cell > 1:
        note += (
            f" A cell stands for {shown.per_cell} positions; it has a color if the support is no sparser "
            "there than on average, that of most of these positions."
        )
    return Caption(
        f"Support of each step in {places([shown.place])}", note + left_out(request, request.supports, shown)
    )


def lambda_star(data: Lambda) -> Caption:
    """Caption lambda* over time."""
    where = f"in {places(data.places)}"
    if many := _many(data.places):
        where = f"median and 10 to 90 % of {many}"
    note = f"Weight of the prior at each refresh, {where}."
    return Caption("lambda* over time", f"{note} {data.clipped:.0%} of all values stand at the clip.")


def retained(request: Request, data: Retained) -> Caption:
    """Caption the retained mass, or what stands in for it."""
    mass = data.of_place
    least, most = (places([end(sorted(mass), key=mass.__getitem__)]) for end in (min, max))
    worst = f"Least in {least}; most in {most}."
    if data.coverage:
        return Caption(
            f"Attention mass in the top-{request.k} positions",
            f"Mean over {data.steps:,} audited steps, all slow: they left nothing out, so there is no "
            f"retained mass. {worst}",
        )
    return Caption(
        "Retained mass of fast steps",
        f"Share of dense attention's probability that a step attended, mean over {data.steps:,} fast "
        f"audited steps. {worst}",
    )


def timeline(data: Timeline) -> Caption:
    """Caption the timeline."""
    note = "Sums over layers."
    if data.prefill_us is not None:
        note += f" Step 0, the prefill, took {data.prefill_us / 1000:,.1f} ms and is left out."
    if data.stepless:
        note += f" {data.stepless:,} drafting passes without a step of their own are left out."
    if data.per_bar > 1:
        note += f" A bar is the mean of {data.per_bar} steps."
    if data.audit_us:
        note += f" The audit's time, {data.audit_us / 1000:,.1f} ms a step, is left out."
    return Caption("What each step's time went to", note)


def places(found: list[Place]) -> str:
    """Name the layers and KV heads of a figure."""
    layers, heads = ({place[axis] for place in found} for axis in (0, 1))
    one = [
        f"{name} {next(iter(values))}" for name, values in (("layer", layers), ("KV head", heads)) if len(values) == 1
    ]
    many = _many(found)
    return ", ".join(one + ([f"mean over {many}"] if many else []))


def _many(found: list[Place]) -> str:
    layers, heads = (len({place[axis] for place in found}) for axis in (0, 1))
    counts = ((layers, "layers"), (heads, "KV heads"))
    return " x ".join(f"{count} {name}" for count, name in counts if count > 1)


def left_out(request: Request, whole: Supports, shown: Supports | Raster) -> str:
    """Say how many steps were not audited, and how many audited ones are not drawn; "" if none."""
    said = layers_left_out(request)
    if whole.steps < len(request.steps.step):
        said += f" {whole.steps:,} of {len(request.steps.step):,} steps were audited."
    drawn = len(shown.step_N)
    if drawn < whole.steps:
        said += f" {drawn:,} of {whole.steps:,} audited steps are drawn, evenly chosen."
    return said


def layers_left_out(request: Request) -> str:
    """Say how many audited layers are drawn if not all, because of their size; "" if all."""
    drawn = len(request.supports.layers)
    if drawn == request.audited_layers:
        return ""
    return f" {drawn:,} of {request.audited_layers:,} audited layers are drawn, evenly chosen."


LONGEST = 14  # characters of a label
SIDES: Final = ("left", "right")
# colors visible on white and on black
SLOW, WITHIN, ACROSS, CLIP, SEGMENT = "#d1495b", "#2f7fc1", "#e08a2e", "#8a94a0", "#3aa17e"
RASTER = {SELECTED: "#e8b878", READ: "#2f7fc1", MISSED: "#d1495b"}
PHASES = {
    "attention.fast": "#2f7fc1",
    "attention.dense": "#d1495b",
    "attention.mixed": "#8e6bbf",
    "selector": "#e08a2e",
    "top_k": "#c9a227",
    "pack": "#3aa17e",
    "append": "#2aa5b8",
    "sample": "#b5739d",
    REST: "#bcc5cf",
}


def visible(text: str, longest: int = LONGEST) -> str:
    """Write a token for a figure: no line break, no lone blank, at most `longest` characters."""
    shown = printable(text)
    shown = shown.strip() or "␣" * len(shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def step_ticks(steps: Steps, step: np.ndarray, most: int) -> tuple[list[int], list[str]]:
    """Choose labels for an axis with an entry for each step in `step`; return entries and labels.

    Up to `most` entries are all labeled with their step's token. More are labeled at beginnings of sentences,
    with the first words, as far apart as `most` labels would be. A redacted trace has step numbers.
    """
    rows = steps.rows(step)
    if len(step) <= most:
        return list(range(len(step))), [visible(steps.text[row]) or str(steps.step[row]) for row in rows]
    if not any(steps.text):
        return number_ticks(step, most)
    room = len(step) / most
    sentence = steps.sentence[rows]
    kept: list[int] = []
    for entry in np.flatnonzero(np.diff(sentence, prepend=sentence[0] - 1)):
        if not kept or entry - kept[-1] >= room:
            kept.append(int(entry))
    return kept, [_sentence(steps, rows[entry]) for entry in kept]


def number_ticks(step: np.ndarray, most: int) -> tuple[list[int], list[str]]:
    """Choose up to about `most` entries at or after round step numbers; return entries and labels."""
    units = (digit * 10**zeros for zeros in itertools.count() for digit in (1, 2, 5))
    unit = next(unit for unit in units if (step[-1] - step[0]) / unit <= most)
    round_steps = np.arange(-(-step[0] // unit) * unit, step[-1] + 1, unit)
    entries = np.unique(np.searchsorted(step, round_steps)).tolist()
    return entries, [str(step[entry]) for entry in entries]


def _sentence(steps: Steps, row: int) -> str:
    # the sentence's first words, also if the axis lacks its first step
    begin, end = (np.searchsorted(steps.sentence, steps.sentence[row], side) for side in SIDES)
    words = visible("".join(steps.text[begin : min(end, begin + LONGEST)]), LONGEST + 6)
    return f"{steps.step[row]}  {words}".strip()
