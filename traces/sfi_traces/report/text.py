"""The text of a request, token by token."""

from typing import Any

import numpy as np

from sfi_core.machine.text import printable, printable_lines
from sfi_traces.views.view import View

MOST_TOKENS = 10_000
MOST_CHARACTERS = 20_000


def generated(view: View) -> dict[str, Any]:
    """Split the generated tokens into sentences, each with its first `step` and its `tokens`.

    `marked` says whether slow steps are marked, `left_out` how many tokens are left out.
    """
    steps = view.steps
    sentences: list[dict[str, Any]] = []
    for row in range(min(len(steps.step), MOST_TOKENS)):
        if row == 0 or steps.sentence[row] != steps.sentence[row - 1]:
            sentences.append({"step": int(steps.step[row]), "tokens": []})
        sentences[-1]["tokens"].append(
            {
                "text": printable(steps.text[row]) or f" {steps.step[row]} ",
                "slow": bool(steps.slow[row]),
                "about": _about(view, row),
            }
        )
    return {
        "sentences": sentences,
        "marked": not steps.slow.all(),  # not where every step is slow
        "left_out": max(0, len(steps.step) - MOST_TOKENS),
    }


def _about(view: View, row: int) -> str:
    steps = view.steps
    kind = f"slow, {steps.reason[row]}" if steps.slow[row] else "fast"
    kind += ", drafted" if steps.drafted[row] else ""
    elapsed_us = steps.elapsed_us[row]  # an imported trace has none
    took = "" if np.isnan(elapsed_us) else f"; {elapsed_us / 1000:,.2f} ms"
    return f"step {steps.step[row]}: {kind}; attended {steps.attended[row]:,.0f} of {steps.context[row]:,} tokens{took}"


def prompt(view: View) -> dict[str, Any]:
    """Return the prompt's text, without its middle if it is long."""
    tokens = view.recorded.prompt
    text = "".join(token or "" for token in tokens)
    left_out = len(text) - MOST_CHARACTERS
    half = MOST_CHARACTERS // 2
    begin, end = (text, "") if left_out <= 0 else (text[:half], text[-half:])
    begin, end = (printable_lines(part) for part in (begin, end))
    return {"begin": begin, "end": end, "left_out": max(0, left_out), "tokens": len(tokens)}
