"""A run made up from a seed and told to an observer, with the rows that it must become."""

import math
import random
import time
from typing import Any

import torch

from sfi_core.observers import events
from sfi_traces.schema import TABLES
from tests.traces.made import CONFIG, MODEL, overlap

LAYERS, HEADS, TRIGGERS = 2, 2, (3, 7)
AUDIT = {"every": 2, "top": 6, "layers": None, "heads": None}
Rows = dict[str, list[dict[str, Any]]]


def run_event(batch: int = 2, **changes) -> events.RunEvent:
    event = {
        "batch": batch, "requests": batch, "policy": "sfi", "backend": "torch", "device": "cpu",
        "config": CONFIG, "trigger_token_ids": TRIGGERS, "model": MODEL, "audit": AUDIT,
    }  # fmt: skip
    return events.RunEvent(**event | changes)


def step_event(request: int = 0, step: int = 0, **changes) -> events.StepEvent:
    event = {
        "request": request, "step": step, "batch_step": step, "position": 9 + step, "token_id": step % 90,
        "slow": False, "reason": "", "steps_since_slow": 1, "attended_tokens": 5.5, "context_tokens": 10 + step,
        "elapsed_us": 12.5, "audited": False,
    }  # fmt: skip
    return events.StepEvent(**event | changes)


def wait_for(happened, seconds: float = 60.0) -> None:
    """Wait until something has happened."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it happens in time"
        time.sleep(0.002)


def padded(sets: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in sets], dtype=torch.int32)


class Told:
    """Tells one run of `batch` requests, the later ones longer, and keeps the rows it must become.

    Every kind of event is told, though no run has all of them.

    Attributes:
        rows: By table; `token_text` is left out.
    """

    def __init__(self, observer, first: int, batch: int, steps: int, seed: int, **run) -> None:
        self._observer, self._first = observer, first
        self._rng = random.Random(seed)
        self.rows: Rows = {name: [] for name in TABLES}
        self._triggers = [0] * batch
        self._since = [0] * batch
        self._selected: dict[Any, list[int]] = {}
        self._supports: dict[Any, dict[int, list[int]]] = {}
        self._refreshes: dict[Any, int] = {}
        observer.on(run_event(batch, **run))
        self._prompt(batch)
        for step in range(steps):
            alive = range(0 if step < steps // 2 else batch - 1, batch)  # only the last one goes on
            self._step(step, list(alive))

    def _prompt(self, batch: int) -> None:
        counts = [[3 + row, 8 - row] for row in range(batch)]  # in two pieces
        for piece, begun in ((0, -1), (1, None)):
            width = max(count[piece] for count in counts)
            ids = torch.full((batch, width), 99)
            for row, count in enumerate(counts):
                for place in range(count[piece]):
                    token = self._rng.randrange(90)
                    ids[row, width - count[piece] + place] = token
                    position = place + sum(count[:piece])
                    self.rows["prompts"].append({"request": self._first + row, "position": position, "token_id": token})
            count = tuple(c[piece] for c in counts)
            self._observer.on(events.PromptEvent(requests=tuple(range(batch)), ids_BT=ids, count=count))
            if begun is not None:
                self._observer.on(events.BeginStepEvent(step=begun, slow=tuple(range(batch)), fast=()))

    def _step(self, step: int, alive: list[int]) -> None:
        slow = [row for row in alive if step == 0 or self._rng.random() < 0.3]
        fast = tuple(row for row in alive if row not in slow)
        self._observer.on(events.BeginStepEvent(step=step, slow=tuple(slow), fast=fast))
        audited = [row for row in alive if row in slow or step % 2 == 0]
        with self._observer.span("prefill" if step == 0 else "forward"):
            for layer in range(LAYERS):
                with self._observer.span("attention.dense", layer, 100 + layer):
                    pass
                for row in alive:
                    if row in slow:
                        self._select(row, step, layer, heads=[*range(HEADS)])
                    elif self._rng.random() < 0.5:  # as FreeKV corrects some heads, in vain now and then
                        heads = [head for head in range(HEADS) if self._rng.random() < 0.5]
                        self._select(row, step, layer, heads=heads, reason="correction")
                        self._recall(row, step, layer)
                    if row in audited:
                        self._audit(row, step, layer, slow=row in slow)
        looked = [row for row in audited if row in fast]
        if looked:
            self._logits(step, looked)
        for row in slow:
            self._verify(row, step)
        for row in alive:
            self._end(row, step, slow=row in slow, audited=row in audited)

    def _key(self, row: int, step: int) -> dict[str, int]:
        return {"request": self._first + row, "step": step}

    def _number(self) -> float:
        return float(torch.tensor(self._rng.random()))  # as float32

    def _recall(self, row: int, step: int, layer: int) -> None:
        fetched, waited = [self._rng.randrange(9) for _ in range(HEADS)], self._rng.uniform(0, 50)
        self._observer.on(
            events.RecallEvent(
                request=row, step=step, layer=layer, row_bytes=512, waited_us=waited,
                rows_H=torch.tensor(fetched, dtype=torch.int32),
            )
        )  # fmt: skip
        self.rows["recalls"].append(
            {
                **self._key(row, step), "layer": layer, "rows": sum(fetched),
                "bytes": 512 * sum(fetched), "waited_us": waited,
            }
        )  # fmt: skip

    def _select(self, row: int, step: int, layer: int, *, heads: list[int], reason: str = "") -> None:
        names = ["lambda_star", "evidence_norm2", "evidence_dot_prior", "prior_norm2", "evidence_entropy"]
        names += ["query_cosine"] if reason else []
        # a policy without a Selector has no diagnostics; a head may find fewer than its budget
        named = {name: [self._number() for _ in range(HEADS)] for name in names if layer == 0}
        sets = [sorted(self._rng.sample(range(12), self._rng.choice([5, 6]))) for _ in range(HEADS)]
        selecting = torch.tensor([head in heads for head in range(HEADS)])
        self._observer.on(
            events.SelectionEvent(
                request=row, step=step, layer=layer, index_HK=padded(sets, 6), reason=reason,
                diagnostics={name: torch.tensor([values]) for name, values in named.items()},
                heads_H=selecting if reason else None,
            )
        )  # fmt: skip
        for head in heads:
            new = sets[head]
            old = self._selected.get((row, layer, head))
            self._selected[row, layer, head] = new
            both = len(set(new) & set(old or []))
            self.rows["selections"].append(
                {
                    **self._key(row, step), "layer": layer, "head": head, "selected": len(new),
                    **{name: named[name][head] if named else None for name in names},
                    "overlap_previous": overlap(old, new) if old else None,
                    "jaccard_previous": both / len(set(new) | set(old)) if old else None,
                    "added": len(new) - both, "removed": len(old) - both if old else 0,
                    "positions": new, "reason": reason,
                }
            )  # fmt: skip

    def _audit(self, row: int, step: int, layer: int, *, slow: bool) -> None:
        sets = [sorted(self._rng.sample(range(14), 6)) for _ in range(HEADS)]
        sets[1] = sets[1][:4]  # not enough tokens yet
        mass = [[self._number() for _ in positions] for positions in sets]
        retained, error, least, top_1 = (self._number() for _ in range(4))
        read = [[self._rng.random() < 0.5 for _ in positions] for positions in sets]
        cosine = math.nan if step == 0 else self._number()
        self._observer.on(
            events.AuditEvent(
                request=row, step=step, layer=layer, slow=slow, heads=(0, 5), index_HK=padded(sets, 6),
                mass_HK=torch.tensor([values + [0.0] * (6 - len(values)) for values in mass]),
                read_HK=torch.tensor([values + [False] * (6 - len(values)) for values in read]),
                retained_H=torch.full((HEADS,), retained), retained_min_H=torch.full((HEADS,), least),
                query_cosine_H=torch.full((HEADS,), cosine), output_error_H=torch.full((HEADS,), error),
                top_1_read_H=torch.full((HEADS,), top_1),
            )
        )  # fmt: skip
        for place, head in enumerate((0, 5)):
            seen = self._supports.setdefault((row, layer, head), {})
            last, refreshed = seen.get(step - 1), seen.get(self._refreshes.get((row, layer, head)))
            self.rows["supports"].append(
                {
                    **self._key(row, step), "layer": layer, "head": head, "positions": sets[place],
                    "mass": mass[place], "retained_mass": retained,
                    "overlap_previous_step": overlap(last, sets[place]) if last else None,
                    "overlap_last_refresh": overlap(refreshed, sets[place]) if refreshed else None,
                    "query_cosine": None if step == 0 else cosine, "output_error": error,
                    "read": read[place], "top_1_read": top_1, "retained_mass_min": least,
                }
            )  # fmt: skip
            seen[step] = sets[place]
            if slow:
                self._refreshes[row, layer, head] = step

    def _logits(self, step: int, rows: list[int]) -> None:
        kl, agrees = [self._number() for _ in rows], [self._rng.random() < 0.5 for _ in rows]
        token, probability = [self._rng.randrange(90) for _ in rows], [self._number() for _ in rows]
        event = events.LogitsEvent(
            requests=tuple(rows), steps=(step,) * len(rows), kl_R=torch.tensor(kl), agrees_R=torch.tensor(agrees),
            dense_token_R=torch.tensor(token), dense_probability_R=torch.tensor(probability),
        )  # fmt: skip
        self._observer.on(event)
        names = ("kl_next_token", "argmax_agrees", "dense_token_id", "dense_probability")
        self.rows["logits"] += [
            self._key(row, step) | dict(zip(names, values, strict=True))
            for row, *values in zip(rows, kl, agrees, token, probability, strict=True)
        ]

    def _verify(self, row: int, step: int) -> None:
        facts = {
            "batch_step": step, "base": 40 + step, "drafted": 3, "accepted": self._rng.randrange(4),
            "reason": "limit", "evidence_position": self._rng.choice([None, 43 + step]),
            "attended_tokens": self._number(), "selection_tokens": self._number(),
            "elapsed_us": self._rng.uniform(100, 900),
        }  # fmt: skip
        self._observer.on(events.VerificationEvent(request=row, step=step, **facts))
        self.rows["verifications"].append({**self._key(row, step), **facts})

    def _end(self, row: int, step: int, *, slow: bool, audited: bool) -> None:
        self._since[row] = 0 if slow else self._since[row] + 1
        event = step_event(
            row, step, token_id=self._rng.randrange(10), slow=slow, audited=audited,
            reason="" if not slow else "first" if step == 0 else "t_max",
            steps_since_slow=self._since[row], elapsed_us=self._rng.uniform(100, 900), selection_tokens=self._number(),
        )  # fmt: skip
        self._observer.on(event)
        trigger = event.token_id in TRIGGERS
        self.rows["steps"].append(
            {
                **self._key(row, step), "position": event.position, "token_id": event.token_id,
                "slow": slow, "reason": event.reason, "steps_since_slow": event.steps_since_slow,
                "sentence": self._triggers[row], "trigger": trigger,
                "attended_tokens": 5.5, "selection_tokens": event.selection_tokens,
                "context_tokens": event.context_tokens,
                "read_ratio": 5.5 / event.context_tokens, "elapsed_us": event.elapsed_us, "audited": audited,
                "batch_step": step, "drafted": False,
            }
        )  # fmt: skip
        self._triggers[row] += trigger
