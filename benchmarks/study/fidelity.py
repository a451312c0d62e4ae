"""Part `fidelity`: how far each method's next-token distributions are from full attention's."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.listed import FULL, Listed
from benchmarks.study.records import Key, rounded, short
from benchmarks.study.texts import Place, window
from benchmarks.study.work import FAILURES
from sfi_core.measure.evaluation.fidelity import Fidelity, Reference, fidelity, reference
from sfi_core.measure.evaluation.text_windows import sentence_positions
from sfi_core.models.load import first_line
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger_set import resolve_triggers


@dataclass(frozen=True, slots=True)
class FidelityPart:
    """The rows of windows that are decoded together: one of full attention, one for each method and share.

    Attributes:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer.
        name: What rows call the model.
        methods: Methods at their shares.
        tokens: Decoded tokens of a window, the first of which follows from the prompt.
    """

    model: Any
    tokenizer: Any
    name: str
    methods: Sequence[Listed]
    tokens: int

    def keys(self, places: Sequence[Place]) -> list[Key]:
        """Return the keys of the rows of windows that are decoded together."""
        which = [{"method": FULL, "share": None}, *map(_which, self.methods)]
        return [key({**self._where(place), **row}) for place in places for row in which]

    def make(self, places: Sequence[Place], pending: set[Key]) -> Iterator[dict[str, Any]]:
        """Decode windows together: under full attention once, then under every pending method.

        Raises:
            InputError: The half of a kind has no such window.
        """
        given = [window(self.tokenizer, place, self.tokens) for place in places]
        full = reference(self.model, self.tokenizer, given)
        for place, own in zip(places, self._full(full), strict=True):
            row = {**self._where(place), "method": FULL, "share": None, **own}
            if key(row) in pending:
                yield row
        for one in self.methods:
            rows = [{**self._where(place), **_which(one)} for place in places]
            if pending.intersection(map(key, rows)):
                found = self._compared(one, places[0], full)
                for row, own in zip(rows, found, strict=True):
                    if key(row) in pending:
                        yield row | own

    def _full(self, full: Reference) -> Iterator[dict[str, Any]]:
        ends = frozenset(resolve_triggers(self.tokenizer, SfiConfig()))
        for place, one in enumerate(full.windows):
            given = one.ids[one.prompt_tokens :]
            nll = [
                -float(log_BV[place, token])
                for log_BV, token in zip(full.log_SBV, given, strict=True)
            ]
            in_sentence = sentence_positions(one, ends)
            yield {"start": one.start, "nll": rounded(nll), "in_sentence": in_sentence}

    def _compared(self, one: Listed, place: Place, full: Reference) -> list[dict[str, Any]]:
        began = time.monotonic()
        try:
            # what is random is drawn anew in each window
            config = one.variant.config(place.length).replace(trigger_seed=place.seed)
            policy = one.variant.method.policy
            found = fidelity(self.model, self.tokenizer, full, config, policy=policy)
        except FAILURES as error:
            return [{"error": first_line(error)}] * len(full.windows)
        each = {
            "budget": config.budget,
            "recent": config.recent,
            "seconds": round((time.monotonic() - began) / len(found), 1),
        }
        return [each | _measured(part) for part in found]

    def _where(self, place: Place) -> dict[str, Any]:
        return {"model": self.name, **place.columns(), "tokens": self.tokens}


def _measured(found: Fidelity) -> dict[str, Any]:
    report = found.reports[0]
    return {
        "kl": rounded(found.kl),
        "agrees": "".join(str(int(same)) for same in found.agrees),
        "slow": "".join(str(int(slow)) for slow in found.slow),
        "nll": short(sum(found.nll[1:]) / max(1, len(found.nll) - 1)),
        "read": short(report.read_ratio),
        "selecting": short(report.selection_ratio),
    }


def _which(one: Listed) -> dict[str, Any]:
    return {"method": one.text, "share": one.share}


def key(row: Mapping[str, Any]) -> Key:
    """Return what tells a row from others."""
    names = ("model", "kind", "half", "text", "length", "tokens", "number", "method", "share")
    return tuple(row[name] for name in names)
