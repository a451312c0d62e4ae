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
    """The rows of a window: one of full attention, one for each method and share.

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

    def keys(self, place: Place) -> list[Key]:
        """Return the keys of a window's rows."""
        where = self._where(place)
        rows = [{"method": FULL, "share": None}, *(_which(one) for one in self.methods)]
        return [key({**where, **row}) for row in rows]

    def make(self, place: Place, pending: set[Key]) -> Iterator[dict[str, Any]]:
        """Decode a window under full attention once, then under every pending method.

        Raises:
            InputError: The half of the kind has no such window.
        """
        given = window(self.tokenizer, place, self.tokens)
        full = reference(self.model, self.tokenizer, given)
        where = self._where(place)
        row = {**where, "method": FULL, "share": None}
        if key(row) in pending:
            yield row | self._full(full)
        for one in self.methods:
            row = {**where, **_which(one)}
            if key(row) in pending:
                yield row | self._compared(one, place, full)

    def _full(self, full: Reference) -> dict[str, Any]:
        ends = resolve_triggers(self.tokenizer, SfiConfig())
        given = full.window.ids[full.window.prompt_tokens :]
        nll = [-float(log_V[token]) for log_V, token in zip(full.log_SV, given, strict=True)]
        return {
            "start": full.window.start,
            "nll": rounded(nll),
            "in_sentence": sentence_positions(full.window, frozenset(ends)),
        }

    def _compared(self, one: Listed, place: Place, full: Reference) -> dict[str, Any]:
        began = time.monotonic()
        try:
            # what is random is drawn anew in each window
            config = one.variant.config(place.length).replace(trigger_seed=place.seed)
            policy = one.variant.method.policy
            found = fidelity(self.model, self.tokenizer, full, config, policy=policy)
        except FAILURES as error:
            return {"error": first_line(error)}
        sizes = {"budget": config.budget, "recent": config.recent}
        return sizes | _measured(found) | {"seconds": round(time.monotonic() - began, 1)}

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
