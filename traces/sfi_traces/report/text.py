"""The text of a request, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sfi_core.errors import TraceError
from sfi_core.machine.text import printable, printable_lines
from sfi_traces.model.request import Request
from sfi_traces.views.captions import visible
from sfi_traces.views.table import dense_words
from sfi_traces.views.words import step_words

MOST_TOKENS, MOST_STEPS, LONGEST = 10_000, 12, 90  # generated tokens; disagreements; characters of a passage
MOST_CHARACTERS = 20_000


def generated(request: Request) -> dict[str, Any]:
    """Split the generated tokens into sentences, each with its first `step` and its `tokens`.

    `marked` says whether slow steps are marked, `left_out` how many tokens are left out.
    """
    steps, other = request.steps, set(request.disagreeing)
    worded = any(steps.text)  # an empty one is part of a character then
    sentences: list[dict[str, Any]] = []
    for row in range(min(len(steps.step), MOST_TOKENS)):
        if row == 0 or steps.sentence[row] != steps.sentence[row - 1]:
            sentences.append({"step": int(steps.step[row]), "tokens": []})
        sentences[-1]["tokens"].append(
            {
                "text": printable(steps.text[row]) if worded else f" {steps.step[row]} ",
                "slow": bool(steps.slow[row]),
                "other": int(steps.step[row]) in other,
                "about": _about(request, row),
            }
        )
    return {
        "sentences": sentences,
        "marked": not steps.slow.all(),  # not where every step is slow
        "left_out": max(0, len(steps.step) - MOST_TOKENS),
    }


def disagreements(request: Request, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """List the steps where full attention would have said another token, with what the step missed most.

    `steps` are the summary's, the largest KL first; `left_out` counts those that are not listed.
    """
    shown = [step for step in steps if request.steps.rows(np.array(step["step"])) < MOST_TOKENS][:MOST_STEPS]
    listed = [
        {
            "row": int(request.steps.rows(np.array(step["step"]))),
            "step": step["step"],
            "token": printable(step["token_text"] or ""),
            "dense": dense_words(step),
            "kl": f"{step['kl_next_token']:.3f}",
            "missed": _missed(request, step["step"]),
        }
        for step in shown
    ]
    return {"listed": listed, "left_out": len(steps) - len(shown)}


def _missed(request: Request, step: int) -> str:
    try:
        missed = step_words(request, step).missed
    except TraceError:  # no text, or no positions of selections
        return ""
    if not missed:
        return ""
    first = missed[0]
    return f"{visible(first.text, LONGEST)} ({first.mass or 0:.1%} of the attention)"


def _about(request: Request, row: int) -> str:
    steps = request.steps
    kind = f"slow, {steps.reason[row]}" if steps.slow[row] else "fast"
    kind += ", drafted" if steps.drafted[row] else ""
    elapsed_us = steps.elapsed_us[row]  # an imported trace has none
    took = "" if np.isnan(elapsed_us) else f"; {elapsed_us / 1000:,.2f} ms"
    dense = request.compared.get(int(steps.step[row]))
    if dense is not None and not dense["argmax_agrees"]:
        took += f"; full attention: {dense_words(dense)}"
    return f"step {steps.step[row]}: {kind}; attended {steps.attended[row]:,.0f} of {steps.context[row]:,} tokens{took}"


def prompt(request: Request) -> dict[str, Any]:
    """Return the prompt's text, without its middle if it is long."""
    tokens = request.prompt
    text = "".join(token or "" for token in tokens)
    left_out = len(text) - MOST_CHARACTERS
    half = MOST_CHARACTERS // 2
    begin, end = (text, "") if left_out <= 0 else (text[:half], text[-half:])
    begin, end = (printable_lines(part) for part in (begin, end))
    return {"begin": begin, "end": end, "left_out": max(0, left_out), "tokens": len(tokens)}
