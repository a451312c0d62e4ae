"""Titles, notes, colors and token labels of the figures, shared by `sfi trace plot` and `sfi trace report`."""

from typing import NamedTuple

from sfi_core.machine.text import printable
from sfi_traces.model.request import Request
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Place
from sfi_traces.views.figure_data import MOST_LAG, Lambda, Timeline


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
        f"{request.trace.unit} {request.index}",
        f"{prompt:,} prompt tokens",
        f"{len(steps):,} steps",
    ]
    if manifest["finished"] is None:
        words.append("killed")
    return ", ".join(words)


def support(request: Request) -> str:
    """Describe the supports; an import may have an indexer's selections instead."""
    top = request.trace.manifest["audit"]["top"]
    if request.trace.reads_own_selection:
        return f"Imported selections of up to {top} positions"
    return f"Top-{top} of dense attention"


def stability(request: Request, shown: Supports) -> Caption:
    """Caption the heat map of the steps in `shown`."""
    axes = "the generated text" if any(request.steps.text) else "steps"
    note = f"{support(request)}, {places(request.supports.places)}. Axes: {axes}. Lines: sentence boundaries."
    return Caption("Support overlap of every two steps", note + left_out(request, shown))


def lag(request: Request) -> Caption:
    """Caption the overlap by lag."""
    note = (
        f"{support(request)}, {places(request.supports.places)}. Pairs of audited steps up to "
        f"{MOST_LAG} steps apart; bands hold 10 to 90 % of them. Two random ones overlap by "
        f"{request.supports.chance:.3f}.{layers_left_out(request)}"
    )
    return Caption("Support overlap by lag, within a sentence and across a boundary", note)


def lambda_star(data: Lambda) -> Caption:
    """Caption lambda* over time."""
    many = _many(data.places)
    where = f"median and 10 to 90 % of {many}" if many else f"in {places(data.places)}"
    note = f"Weight of the prior at each refresh, {where}. {data.clipped:.0%} of all values stand at the clip."
    return Caption("lambda* over time", note)


def retained(mass: dict[Place, float], steps: int) -> Caption:
    """Caption the retained mass."""
    least, most = (places([end(sorted(mass), key=mass.__getitem__)]) for end in (min, max))
    note = (
        f"Share of dense attention's probability that a step attended, mean over {steps:,} fast audited steps. "
        f"Least in {least}; most in {most}."
    )
    return Caption("Retained mass of fast steps", note)


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


def places(shown: list[Place]) -> str:
    """Name the layers and KV heads of a figure."""
    axes = zip(("layer", "KV head"), map(set, zip(*shown, strict=True)), strict=True)
    words = [f"{name} {next(iter(values))}" for name, values in axes if len(values) == 1]
    many = _many(shown)
    return ", ".join(words + ([f"mean over {many}"] if many else []))


def _many(shown: list[Place]) -> str:
    axes = zip(("layers", "KV heads"), map(set, zip(*shown, strict=True)), strict=True)
    return " x ".join(f"{len(values)} {name}" for name, values in axes if len(values) > 1)


def left_out(request: Request, shown: Supports) -> str:
    """Say how many steps were not audited, and how many audited ones are not drawn; "" if none."""
    whole, said = request.supports, layers_left_out(request)
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
SLOW, WITHIN, ACROSS, CLIP = "#d1495b", "#2f7fc1", "#e08a2e", "#8a94a0"  # visible on white and on black


def visible(text: str, longest: int = LONGEST) -> str:
    """Write a token for a figure: no line break, no lone blank, at most `longest` characters."""
    shown = printable(text)
    shown = shown.strip() or "␣" * len(shown)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
