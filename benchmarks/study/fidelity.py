"""Part `fidelity`: how far each method's next-token distributions are from full attention's."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from benchmarks.study.fresh import selections_noted
from benchmarks.study.last_queries import queries_kept
from benchmarks.study.listed import Listed
from benchmarks.study.part import FAILURES, Part, Row
from benchmarks.study.records import Key, rounded, short
from benchmarks.study.texts import Place, window
from sfi_core.machine.text import first_line
from sfi_core.measure.evaluation.fidelity import Fidelity, Reference, fidelity, reference
from sfi_core.observers.events import AuditEvent
from sfi_core.observers.observer import NullObserver
from sfi_core.settings.engine import AuditConfig, EngineOptions

TOP = 64  # positions of a support


class FidelityPart(Part):
    """An item is the windows of all kinds at one place: they are decoded together."""

    name = "fidelity"
    columns = ("model", "kind", "half", "text", "length", "tokens", "number", "method", "share")
    table = "front"

    def items(self) -> list[list[Place]]:
        """Put the kinds together: a step reads the weights once for all of them."""
        groups: dict[tuple[int, int, str], list[Place]] = {}
        for place in super().items():
            groups.setdefault((place.number, place.length, place.half), []).append(place)
        return list(groups.values())

    @property
    def _engine(self) -> EngineOptions:
        # compiled steps round bfloat16 elsewhere: full attention by modules has 0.0003 nats to its own compiled steps
        return EngineOptions(graphs=False) if self.options.modules else EngineOptions()

    def rows(self, item: Sequence[Place]) -> list[Row]:
        """See `Part`."""
        rows_of = super().rows
        return [row for place in item for row in rows_of(place)]

    def make(self, item: Sequence[Place], pending: set[Key]) -> Iterator[Row]:
        """Decode windows together: under full attention once, then under every pending method."""
        given = [window(self.tokenizer, place, self.options.tokens) for place in item]
        full = reference(self.model, self.tokenizer, given, self._engine)
        rows = self.rows(item)
        count = 1 + len(self.methods)  # rows of a place
        for row, columns in zip(rows[::count], self._full(full), strict=True):
            yield row | columns
        for number, listed in enumerate(self.methods, 1):
            mine = rows[number::count]
            if pending.intersection(map(self.key, mine)):
                for row, columns in zip(mine, self._compared(listed, item[0], full), strict=True):
                    yield row | columns

    def _full(self, full: Reference) -> Iterator[Row]:
        for place, text in enumerate(full.windows):
            given = text.ids[text.prompt_tokens :]
            nll = [-float(log_BV[place, token]) for log_BV, token in zip(full.log_SBV, given, strict=True)]
            yield {"start": text.start, "nll": rounded(nll)}

    def _compared(self, listed: Listed, place: Place, full: Reference) -> list[Row]:
        began = time.monotonic()
        try:
            # what is random is drawn anew in each window
            config = listed.method.config_for(place.length).replace(trigger_seed=place.seed)
            policy = listed.method.policy
            seen, every = ByLayer(len(full.windows)), self.options.audit
            watched = {"observers": [seen], "audit": AuditConfig(every=every, top=TOP)} if every else {}
            with selections_noted(), queries_kept():
                results = fidelity(
                    self.model, self.tokenizer, full, config, policy=policy, engine=self._engine, **watched
                )
        except FAILURES as error:
            return [{"error": first_line(error)}] * len(full.windows)
        each = {
            "budget": config.budget,
            "recent": config.recent,
            "seconds": round((time.monotonic() - began) / len(results), 1),
        }
        return [each | _measured(part) | by_layer for part, by_layer in zip(results, seen.means(), strict=True)]


class ByLayer(NullObserver):
    """Sums up, by request and layer, what audited fast steps read.

    Of a layer's steps and KV heads, the mean share of the `TOP` likeliest positions that they read (`recall`), of all
    probability (`retained`), and the error of the output as a share of its norm (`output_error`).
    """

    def __init__(self, requests: int) -> None:
        self._sums = [defaultdict[int, list[torch.Tensor]](list) for _ in range(requests)]

    def on_audit(self, event: AuditEvent) -> None:
        """Add a layer's step."""
        if event.slow:
            return
        assert event.read_HK is not None, "the audit's own"
        recall_H = (event.read_HK & (event.index_HK >= 0)).sum(1) / (event.index_HK >= 0).sum(1)
        figures = torch.stack([recall_H, event.retained_H, event.output_error_H])
        self._sums[event.request][event.layer].append(figures.mean(1))

    def means(self) -> list[Row]:
        """Return for each request the means, by layer; nothing without an audit."""
        rows = []
        for layers in self._sums:
            mean_3L = [torch.stack(steps).mean(0).tolist() for _, steps in sorted(layers.items())]
            columns = [rounded(column) for column in zip(*mean_3L, strict=True)]
            rows.append(dict(zip(("recall", "retained", "output_error"), columns, strict=False)))
        return rows


def _measured(result: Fidelity) -> Row:
    report = result.reports[0]
    return {
        "kl": rounded(result.kl),
        "agrees": "".join(str(int(same)) for same in result.agrees),
        "slow": "".join(str(int(slow)) for slow in result.slow),
        "nll": short(sum(result.nll[1:]) / max(1, len(result.nll) - 1)),
        "read": short(report.read_ratio),
        "selecting": short(report.selection_ratio),
    }
