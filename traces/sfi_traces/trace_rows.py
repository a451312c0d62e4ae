"""From events to rows: what the background thread works out while decoding goes on."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sfi_core.observer import (
    AuditEvent,
    LogitsEvent,
    PromptEvent,
    RunEvent,
    SelectionEvent,
    StepEvent,
)
from sfi_traces.overlap import intersection_size, overlap_coefficient, size
from sfi_traces.schema import TABLES
from sfi_traces.table_buffer import TableBuffer, list_column
from sfi_traces.timing import Span
from sfi_traces.token_text import TokenText

DIAGNOSTICS = (
    "lambda_star",
    "evidence_norm2",
    "evidence_dot_prior",
    "prior_norm2",
    "evidence_entropy",
)


class TraceRows:
    """The tables of a trace as they grow.

    Attributes:
        tables: Rows that wait for their part file.
        prompts: The manifest's list of prompts.
    """

    def __init__(self, tokenizer: Any, *, positions: bool, redact_text: bool) -> None:
        self.tables = {name: TableBuffer(schema) for name, schema in TABLES.items()}
        self.prompts: list[dict[str, Any]] = []
        self._text = TokenText(tokenizer) if tokenizer is not None and not redact_text else None
        self._positions, self._redacted = positions, redact_text
        self._first = self._batch = 0
        self._run_state()
        self._takers: dict[type, Callable[..., None]] = {
            RunEvent: self.on_run,
            PromptEvent: self.on_prompt,
            StepEvent: self.on_step,
            SelectionEvent: self.on_selection,
            AuditEvent: self.on_audit,
            LogitsEvent: self.on_logits,
            list: self.on_spans,
        }

    @property
    def nbytes(self) -> int:
        """What waits for its part files, about."""
        return sum(table.nbytes for table in self.tables.values())

    def take(self, event: Any, *tensors: torch.Tensor) -> None:
        """Take an event, or a list of spans, and the event's tensors on the host."""
        self._takers[type(event)](event, *tensors)

    def _run_state(self) -> None:
        # requests are numbered as the run does; they mean others in the next one
        self._sentence: dict[int, int] = defaultdict(int)
        self._selected: dict[tuple[int, int], torch.Tensor] = {}
        self._last: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self._refreshed: dict[tuple[int, int], torch.Tensor] = {}
        self._hashes: dict[int, Any] = {}

    def on_run(self, event: RunEvent) -> None:
        """Number the requests of this run after those of the last."""
        self._first += self._batch
        self._batch = event.batch
        self._triggers = frozenset(event.trigger_token_ids)
        self._run_state()
        self.prompts += [
            {"request": self._first + row, "tokens": 0, "sha256": None}
            for row in range(event.batch)
        ]

    def on_prompt(self, event: PromptEvent, ids_BT: torch.Tensor) -> None:
        """Take a piece of every request's prompt."""
        for row, count in enumerate(event.count):
            if not count:
                continue
            ids = ids_BT[row, ids_BT.shape[1] - count :].to(torch.int32)
            entry = self.prompts[self._first + row]
            start, entry["tokens"] = entry["tokens"], entry["tokens"] + count
            if self._redacted:  # neither the hash: that of a short prompt can be guessed
                continue
            digest = self._hashes.setdefault(row, hashlib.sha256())
            digest.update(ids.numpy().astype("<i4").tobytes())
            entry["sha256"] = digest.hexdigest()
            columns = {
                "request": entry["request"],
                "position": np.arange(start, start + count, dtype=np.int32),
                "token_id": ids,
                "token_text": self._texts(ids),
            }
            self.tables["prompts"].add_columns(columns, count)

    def on_step(self, event: StepEvent) -> None:
        """Take a step."""
        trigger = event.token_id in self._triggers
        text = None if self._text is None else self._text(event.token_id)
        self.tables["steps"].add_row(
            self._first + event.request,
            event.step,
            event.position,
            None if self._redacted else event.token_id,
            text,
            event.slow,
            event.reason,
            event.steps_since_slow,
            self._sentence[event.request],
            trigger,
            event.attended_tokens,
            event.context_tokens,
            event.attended_tokens / event.context_tokens,
            event.elapsed_us,
            event.audited,
        )
        self._sentence[event.request] += trigger

    def on_selection(
        self, event: SelectionEvent, index_HK: torch.Tensor, *diagnostics: torch.Tensor
    ) -> None:
        """Take a refresh; one that selected nothing, by a policy that never does, has no rows."""
        selected = size(index_HK)
        if not diagnostics and not selected.any():
            return
        H = len(index_HK)
        before = self._selected.get((event.request, event.layer))
        self._selected[event.request, event.layer] = index_HK
        columns: dict[str, Any] = dict.fromkeys(DIAGNOSTICS)
        for name, value in zip(event.diagnostics, diagnostics, strict=True):
            columns[name] = value.reshape(H).float()
        columns |= _changes(before, index_HK)
        if self._positions:
            columns["positions"] = list_column(index_HK, index_HK, pa.int32())
        else:
            columns["positions"] = None
        columns |= {"selected": selected.int(), **self._key(event), "head": np.arange(H)}
        self.tables["selections"].add_columns(columns, H)

    def on_audit(
        self,
        event: AuditEvent,
        index_HK: torch.Tensor,
        mass_HK: torch.Tensor,
        retained_H: torch.Tensor,
        query_cosine_H: torch.Tensor,
        output_error_H: torch.Tensor,
    ) -> None:
        """Take one layer of an audited step."""
        place = (event.request, event.layer)
        step, last = self._last.get(place, (-1, None))
        refreshed = self._refreshed.get(place)
        self._last[place] = (event.step, index_HK)
        if event.slow:
            self._refreshed[place] = index_HK
        columns = {
            **self._key(event),
            "head": list(event.heads),
            "positions": list_column(index_HK, index_HK, pa.int32()),
            "mass": list_column(index_HK, mass_HK.float(), pa.float32()),
            "retained_mass": retained_H.float(),
            "overlap_previous_step": _overlap(last if step == event.step - 1 else None, index_HK),
            "overlap_last_refresh": _overlap(refreshed, index_HK),
            "query_cosine": query_cosine_H.float(),
            "output_error": output_error_H.float(),
        }
        self.tables["supports"].add_columns(columns, len(event.heads))

    def on_logits(self, event: LogitsEvent, kl_R: torch.Tensor, agrees_R: torch.Tensor) -> None:
        """Take the next-token distributions of an audited step."""
        for request, kl, agrees in zip(
            event.requests, kl_R.tolist(), agrees_R.tolist(), strict=True
        ):
            self.tables["logits"].add_row(self._first + request, event.step, kl, agrees)

    def on_spans(self, spans: Sequence[Span]) -> None:
        """Take the spans of a step."""
        for span in spans:
            self.tables["timings"].add_row(*span.row())

    def _key(self, event: SelectionEvent | AuditEvent) -> dict[str, int]:
        request = self._first + event.request
        return {"request": request, "step": event.step, "layer": event.layer}

    def _texts(self, ids: torch.Tensor) -> pa.Array | None:
        # the text of each distinct id once, then of all by its place among them
        if self._text is None:
            return None
        distinct, place = np.unique(ids.numpy(), return_inverse=True)
        texts = pa.array([self._text(token_id) for token_id in distinct.tolist()], pa.string())
        return texts.take(pa.array(place))


def _overlap(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor | None:
    return None if first is None else overlap_coefficient(first, second)


def _changes(before: torch.Tensor | None, after: torch.Tensor) -> dict[str, Any]:
    # all of them need the intersection, and it costs most: so not by `overlap_coefficient` and `jaccard`
    new = size(after)
    if before is None:
        return {
            "overlap_previous": None,
            "jaccard_previous": None,
            "added": new.int(),
            "removed": 0,
        }
    old, both = size(before), intersection_size(before, after)
    return {
        "overlap_previous": both / torch.minimum(old, new),
        "jaccard_previous": both / (old + new - both),
        "added": (new - both).int(),
        "removed": (old - both).int(),
    }
