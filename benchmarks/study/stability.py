"""Part `stability`: whether supports keep within a sentence and move at its end (SFI, Figures 1 and 2)."""

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.study.listed import FULL
from benchmarks.study.part import Part, Row
from benchmarks.study.records import Key, plain, rounded
from benchmarks.study.sentences import statistics
from benchmarks.study.supports import Recorder, Shared, audit_for
from benchmarks.study.texts import Place, window
from sfi_core.generation.generate import generate
from sfi_core.measure.evaluation.fidelity import Window
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger import resolve_triggers

MODES = ("forced", "free")  # decoded: the text, or what the model itself says, greedily
SIZES = (64, 256)  # positions of a support


class StabilityPart(Part):
    """The rows of a window: for each mode and size of a support, what its supports have in common."""

    name = "stability"
    columns = ("model", "kind", "half", "text", "length", "tokens", "number", "mode", "size")

    def rows(self, item: Place) -> list[Row]:
        """See `Part`."""
        where = self.where(item)
        return [{**where, "mode": mode, "size": size} for mode in MODES for size in SIZES]

    def make(self, item: Place, pending: set[Key]) -> Iterator[Row]:
        """Decode a window under full attention with an audit of every step, and sum its supports up."""
        ends = frozenset(resolve_triggers(self.tokenizer, SfiConfig()))
        for mode in MODES:
            rows = [row for row in self.rows(item) if row["mode"] == mode]
            if not pending.intersection(map(self.key, rows)):
                continue
            began = time.monotonic()
            seen, decoded = self._record(item, mode)
            place_N = np.array(sentence_positions(decoded, ends))
            local = [rounded(heads) for heads in seen.local(item.length)]
            for row in rows:
                shared = Shared.of(seen, item.length, row["size"])
                summary = plain(statistics(shared, place_N, seed=item.number))
                seconds = round(time.monotonic() - began, 1)
                yield row | summary | {"local": local, "start": decoded.start, "seconds": seconds}

    def _record(self, place: Place, mode: str) -> tuple[Recorder, Window]:
        given = window(self.tokenizer, place, self.options.tokens)
        observed: dict[str, Any] = {
            "observers": [seen := Recorder()],
            "audit": audit_for(self.options.tokens, SIZES),
            "policy": FULL,
        }
        prompt = given.ids[: place.length]
        if mode == "forced":
            teacher_force(
                self.model, self.tokenizer, [given.ids], place.length, lambda *_: None,
                SfiConfig(trigger_policy="always"), **observed,
            )  # fmt: skip
            return seen, given
        result = generate(
            self.model, self.tokenizer, [prompt], max_new_tokens=self.options.tokens, stop_token_ids=(), **observed
        )
        return seen, replace(given, ids=(*prompt, *result.report.requests[0].token_ids))


def sentence_positions(window: Window, ends: Collection[int]) -> list[int]:
    """Return for each step the tokens since the last one among `ends`, in the prompt or decoded."""
    last, steps_since = 0, []
    for place, token in enumerate(window.ids[:-1]):
        last = place if token in ends else last
        if place >= window.prompt_tokens - 1:
            steps_since.append(place - last)
    return steps_since
