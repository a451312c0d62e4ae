"""Part `long`: long answers. Where a method's own answer leaves full attention's, and how its error grows."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.study.listed import FULL, Listed
from benchmarks.study.part import FAILURES, Part, Row
from benchmarks.study.records import Key, plain, short
from benchmarks.study.texts import Place, window
from sfi_core.generation.generate import generate
from sfi_core.measure.evaluation.fidelity import Reference, fidelity, reference
from sfi_core.models.load import first_line

CHUNK = 32  # steps that a row's means are over


class LongPart(Part):
    """The rows of a window: one of full attention's greedy answer, one of each method along that answer."""

    name = "long"
    columns = (
        "model", "kind", "half", "text", "length", "tokens", "number", "mode", "method", "share",
    )  # fmt: skip
    table = "long"

    def rows(self, item: Place) -> list[Row]:
        """See `Part`."""
        return [row | {"mode": "greedy"} for row in super().rows(item)]

    def make(self, item: Place, pending: set[Key]) -> Iterator[Row]:
        """Decode the answer under full attention once, then along it under every pending method."""
        first, *rows = self.rows(item)
        given = window(self.tokenizer, item, self.options.tokens)
        prompt = given.ids[: item.length]
        answer = self._answer(prompt, policy=FULL, seed=item.number).token_ids
        full = reference(self.model, self.tokenizer, [replace(given, ids=(*prompt, *answer))])
        yield first | {"start": given.start, "repeats": repeats(answer)}
        for one, row in zip(self.methods, rows, strict=True):
            if self.key(row) in pending:
                yield row | self._compared(one, full)

    def _answer(self, prompt: Sequence[int], *config: Any, **options: Any) -> Any:
        result = generate(
            self.model, self.tokenizer, [prompt], *config, max_new_tokens=self.options.tokens,
            stop_token_ids=(), **options,
        )  # fmt: skip
        return result.report.requests[0]

    def _compared(self, one: Listed, full: Reference) -> Row:
        began = time.monotonic()
        (given,) = full.windows
        prompt, answer = given.ids[: given.prompt_tokens], given.ids[given.prompt_tokens :]
        policy = one.variant.method.policy
        try:
            config = one.variant.config(len(prompt))
            (found,) = fidelity(self.model, self.tokenizer, full, config, policy=policy)
            own = self._answer(prompt, config, policy=policy, shared=full.shared)
        except FAILURES as error:
            return {"error": first_line(error)}
        report = found.reports[0]
        row: Row = plain(
            {
                "kl": chunks(found.kl[1:]),
                "agreement": chunks([float(same) for same in found.agrees[1:]]),
                "slow_steps": report.slow_steps,
                "read": report.read_ratio,
                "selecting": report.selection_ratio,
                "own": {
                    "first_difference": first_difference(answer, own.token_ids),
                    "read": own.read_ratio,
                    "selecting": own.selection_ratio,
                    "repeats": repeats(own.token_ids),
                },
                "seconds": short(time.monotonic() - began, 3),
            }
        )
        return row


def chunks(values: Sequence[float], size: int = CHUNK) -> list[float]:
    """Return the means of pieces of `size` values."""
    return [float(np.mean(values[at : at + size])) for at in range(0, len(values), size)]


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first place where two answers differ; None where none does."""
    pairs = enumerate(zip(ids, others, strict=True))
    return next((at for at, (one, other) in pairs if one != other), None)


def repeats(ids: Sequence[int], size: int = 4) -> float:
    """Return the share of an answer's runs of `size` tokens that occurred before in the answer."""
    runs = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    return short(1 - len(set(runs)) / max(1, len(runs)), 3)
