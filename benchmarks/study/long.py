"""Part `long`: long answers. Where a method's own answer leaves full attention's, and how its error grows."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.study.listed import FULL, Listed
from benchmarks.study.records import Key, plain, short
from benchmarks.study.texts import Place, window
from benchmarks.study.work import FAILURES
from sfi_core.generation.generate import generate
from sfi_core.measure.evaluation.fidelity import Reference, fidelity, reference
from sfi_core.measure.evaluation.text_windows import Window
from sfi_core.models.load import first_line
from sfi_core.settings.sampling import Sampling

MODES = ("greedy", "sampled", "text")
CHUNK = 32  # steps that a row's means are over
SAMPLED = Sampling(do_sample=True, temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True)
class LongPart:
    """The rows of a window: for each mode one of full attention, one for each method and share.

    Attributes:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer.
        name: What rows call the model.
        methods: Methods at their shares.
        tokens: Tokens of an answer.
        modes: What the methods are teacher-forced along: full attention's "greedy" or "sampled" answer, or
            the "text". Greedy answers of a small model repeat themselves; `repeats` says how much.
    """

    model: Any
    tokenizer: Any
    name: str
    methods: Sequence[Listed]
    tokens: int
    modes: Sequence[str] = MODES

    def keys(self, place: Place) -> list[Key]:
        """Return the keys of a window's rows."""
        return [key(row) for mode in self.modes for row in self._rows(place, mode)]

    def make(self, place: Place, pending: set[Key]) -> Iterator[dict[str, Any]]:
        """Decode the answer under full attention once, then along it under every pending method.

        Raises:
            InputError: The half of the kind has no such window.
        """
        for mode in self.modes:
            first, *rows = self._rows(place, mode)
            if not pending.intersection(map(key, (first, *rows))):
                continue
            full = reference(self.model, self.tokenizer, [self._answer(place, mode)])
            answer = full.windows[0].ids[place.length :]
            if key(first) in pending:
                yield first | {"start": full.windows[0].start, "repeats": repeats(answer)}
            for one, row in zip(self.methods, rows, strict=True):
                if key(row) in pending:
                    yield row | self._compared(one, full, mode)

    def _rows(self, place: Place, mode: str) -> list[dict[str, Any]]:
        where = {"model": self.name, **place.columns(), "tokens": self.tokens, "mode": mode}
        which = [(FULL, None), *((one.text, one.share) for one in self.methods)]
        return [{**where, "method": method, "share": share} for method, share in which]

    def _answer(self, place: Place, mode: str) -> Window:
        given = window(self.tokenizer, place, self.tokens)
        if mode == "text":
            return given
        prompt = given.ids[: place.length]
        result = generate(
            self.model, self.tokenizer, [prompt], policy=FULL, max_new_tokens=self.tokens, seed=place.number,
            stop_token_ids=(), sampling=Sampling() if mode == "greedy" else SAMPLED,
        )  # fmt: skip
        return replace(given, ids=(*prompt, *result.report.requests[0].token_ids))

    def _compared(self, one: Listed, full: Reference, mode: str) -> dict[str, Any]:
        began = time.monotonic()
        context = full.windows[0].prompt_tokens
        policy = one.variant.method.policy
        try:
            config = one.variant.config(context)
            (found,) = fidelity(self.model, self.tokenizer, full, config, policy=policy)
            own = self._own(one, full) if mode == "greedy" else None
        except FAILURES as error:
            return {"error": first_line(error)}
        report = found.reports[0]
        row: dict[str, Any] = plain(
            {
                "kl": chunks(found.kl[1:]),
                "agreement": chunks([float(same) for same in found.agrees[1:]]),
                "slow_steps": report.slow_steps,
                "read": report.read_ratio,
                "selecting": report.selection_ratio,
                "own": own,
                "seconds": short(time.monotonic() - began, 3),
            }
        )
        return row

    def _own(self, one: Listed, full: Reference) -> dict[str, Any]:
        # the method's own greedy answer beside full attention's
        prompt, answer = full.windows[0].ids, full.windows[0].ids[full.windows[0].prompt_tokens :]
        prompt = prompt[: full.windows[0].prompt_tokens]
        result = generate(
            self.model, self.tokenizer, [prompt], one.variant.config(len(prompt)),
            policy=one.variant.method.policy, max_new_tokens=self.tokens, stop_token_ids=(),
            shared=full.shared,
        )  # fmt: skip
        report = result.report.requests[0]
        return {
            "first_difference": first_difference(answer, report.token_ids),
            "read": report.read_ratio,
            "selecting": report.selection_ratio,
            "repeats": repeats(report.token_ids),
        }


def key(row: Mapping[str, Any]) -> Key:
    """Return what tells a row from others."""
    names = (
        "model",
        "kind",
        "half",
        "text",
        "length",
        "tokens",
        "number",
        "mode",
        "method",
        "share",
    )
    return tuple(row[name] for name in names)


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
