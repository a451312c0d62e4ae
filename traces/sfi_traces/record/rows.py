"""Turns events into rows of tables, in the background thread."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_core.observers import events
from sfi_core.observers.observer import HANDLERS
from sfi_traces.overlap import Overlap, SelectedSets
from sfi_traces.record.folder import Lists, TableBuffer
from sfi_traces.record.timing import Span
from sfi_traces.schema import TABLES

Array = npt.NDArray[Any]
Place = tuple[int, int]  # request, layer
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MOST = 4  # bytes of a character: so many replacements in a row are no beginning of one
# columns of supports whose tensors have other names
OTHER_NAMES = {"retained_mass": "retained_H", "retained_mass_min": "retained_min_H"}


class TraceRows:
    """The tables of a trace as they grow.

    Attributes:
        tables: Rows that wait for their part file.
        prompts: The manifest's list of prompts.
        graphs: Whether any step was replayed as a CUDA graph; None before the first decoding step.
        not_replayed: Why steps were not replayed though graphs were on.
    """

    def __init__(self, tokenizer: Any, *, positions: bool, redact_text: bool, offset_us: float = 0.0) -> None:
        """Start with empty tables; `offset_us` is when the spans' clock began in the run."""
        self.tables = {name: TableBuffer(schema) for name, schema in TABLES.items()}
        self.prompts: list[dict[str, Any]] = []
        self._text = TokenText(tokenizer) if tokenizer is not None and not redact_text else None
        self._positions, self._redacted, self._offset_us = positions, redact_text, offset_us
        self.graphs: bool | None = None
        self.not_replayed: str | None = None
        self._first = self._requests = 0

    @property
    def nbytes(self) -> int:
        """Estimated bytes of the waiting rows."""
        return sum(table.nbytes for table in self.tables.values())

    def take(self, event: Any, arrays: Mapping[str, Array]) -> None:
        """Dispatch an event and its tensors' values by name, or a list of spans."""
        getattr(self, HANDLERS.get(type(event), "on_spans"))(event, **arrays)

    def on_run(self, event: events.RunEvent) -> None:
        """Number the requests of this run after those of the last."""
        self._first += self._requests
        self._requests = event.requests
        self._triggers = frozenset(event.trigger_token_ids)
        self._rank = event.rank
        heads = ((layer["layer"], layer["heads"]) for layer in event.model["layers"])
        self._first_head = {layer: event.rank * count for layer, count in heads}
        # by the run's own request numbers, which the next run uses anew
        self._sentence: dict[int, int] = defaultdict(int)
        self._selected: dict[Place, SelectedSets] = {}
        self._last: dict[Place, tuple[int, Array]] = {}
        self._refreshed: dict[Place, Array] = {}
        self._hashes: dict[int, Any] = {}
        self._prompts: dict[int, dict[str, Any]] = {}
        self._sequences: dict[tuple[str, int], TokenText] = {}  # by table and request
        for request in range(event.batch):
            self._prompt(request)

    def on_prompt(self, event: events.PromptEvent, ids_BT: Array) -> None:
        """Add a piece of every request's prompt."""
        for row, (request, count) in enumerate(zip(event.requests, event.count, strict=True)):
            entry = self._prompt(request)
            start, entry["tokens"] = entry["tokens"], entry["tokens"] + count
            if event.settings:
                entry["settings"] = dict(event.settings)
            if self._redacted or not count:
                continue
            ids = ids_BT[row, ids_BT.shape[1] - count :].astype("<i4")
            digest = self._hashes.setdefault(request, hashlib.sha256())
            digest.update(ids.tobytes())
            entry["sha256"] = digest.hexdigest()  # not if redacted: short prompts can be guessed
            columns = {
                "request": entry["request"],
                "position": np.arange(start, start + count, dtype=np.int32),
                "token_id": ids,
                "token_text": self._texts("prompts", request, ids.tolist()),
            }
            self.tables["prompts"].add_columns(count, columns)

    def on_begin_step(self, event: events.BeginStepEvent) -> None:
        """Note why steps are not replayed."""
        self.not_replayed = event.not_replayed or None

    def on_step(self, event: events.StepEvent) -> None:
        """Add a step."""
        trigger = event.token_id in self._triggers
        text = self._texts("steps", event.request, [event.token_id])
        self._add(
            "steps",
            event,
            token_id=None if self._redacted else event.token_id,
            token_text=None if text is None else text[0],
            sentence=self._sentence[event.request],
            trigger=trigger,
            read_ratio=event.attended_tokens / event.context_tokens,
            draft_token_id=None if self._redacted else event.draft_token_id,
            bandwidth_share=None,
        )
        self._sentence[event.request] += trigger
        if event.step > 0 and event.graphs is not None:
            self.graphs = event.graphs or bool(self.graphs)

    def on_verification(self, event: events.VerificationEvent) -> None:
        """Add a verification of a lossless run."""
        self._add("verifications", event)

    def on_selection(
        self, event: events.SelectionEvent, index_HK: Array, heads_H: Array | None = None, **diagnostics: Array
    ) -> None:
        """Add a selection; an empty one without diagnostics (a policy that never selects) adds no rows."""
        H = len(index_HK)
        heads = np.arange(H) if heads_H is None else np.flatnonzero(heads_H)
        known_HK = index_HK[heads] >= 0
        if not diagnostics and not known_HK.any():
            return
        sets = self._selected.setdefault((event.request, event.layer), SelectedSets(H))
        columns = {
            **dict.fromkeys(TABLES["selections"].names, np.nan),
            **self._key(event),
            "head": heads + self._first_head[event.layer],
            **{name: value.reshape(H)[heads] for name, value in diagnostics.items()},
            **sets.replace(heads, index_HK[heads]),
            "positions": Lists.of(index_HK[heads], known_HK) if self._positions else None,
            "reason": event.reason,
        }
        self.tables["selections"].add_columns(len(heads), columns)

    def on_recall(self, event: events.RecallEvent, rows_H: Array) -> None:
        """Add the rows that one layer fetched from the host."""
        rows = int(rows_H.sum())
        self._add("recalls", event, rows=rows, bytes=rows * event.row_bytes)

    def on_audit(
        self, event: events.AuditEvent, index_HK: Array, mass_HK: Array, read_HK: Array | None = None, **of_heads: Array
    ) -> None:
        """Add one layer of an audited step; a column `name` is null without a tensor `name_H`."""
        place = (event.request, event.layer)
        step, last = self._last.get(place, (-1, None))
        refreshed = self._refreshed.get(place)
        self._last[place] = (event.step, index_HK)
        if event.slow:
            self._refreshed[place] = index_HK
        known_HK = index_HK >= 0
        columns = {
            **{name: of_heads.get(OTHER_NAMES.get(name, f"{name}_H"), np.nan) for name in TABLES["supports"].names},
            **self._key(event),
            "head": np.array(event.heads) + self._first_head[event.layer],
            "positions": Lists.of(index_HK, known_HK),
            "mass": Lists.of(mass_HK, known_HK),
            "overlap_previous_step": _overlap(last if step == event.step - 1 else None, index_HK),
            "overlap_last_refresh": _overlap(refreshed, index_HK),
            "read": None if read_HK is None else Lists.of(read_HK, known_HK),
        }
        self.tables["supports"].add_columns(len(index_HK), columns)

    def on_logits(
        self, event: events.LogitsEvent, kl_R: Array, agrees_R: Array, dense_token_R: Array, dense_probability_R: Array
    ) -> None:
        """Add the next-token comparison of an audited step, or of tested drafts."""
        requests = [self._first + request for request in event.requests]
        columns = {
            "request": np.array(requests),
            "step": np.array(event.steps),
            "kl_next_token": kl_R,
            "argmax_agrees": agrees_R,
            "dense_token_id": None if self._redacted else dense_token_R,
            "dense_token_text": None if self._text is None else _objects(map(self._text.alone, dense_token_R.tolist())),
            "dense_probability": dense_probability_R,
        }
        self.tables["logits"].add_columns(len(requests), columns)

    def on_spans(self, spans: Sequence[Span]) -> None:
        """Add the spans of a step."""
        rows = []
        for span in spans:
            *key, begin_us, elapsed_us, moved = span.row()
            rows.append((self._first, *key, begin_us + self._offset_us, elapsed_us, moved, self._rank))
        self.tables["timings"].add_rows(rows)

    def _add(self, table: str, event: Any, **known: Any) -> None:
        # a row whose other columns are the event's fields of that name
        known["request"] = self._first + event.request
        names = TABLES[table].names
        row = [known[name] if name in known else getattr(event, name) for name in names]
        self.tables[table].add_rows([row])

    def _prompt(self, request: int) -> dict[str, Any]:
        # the manifest's entry, made when the request's prompt is first read
        if request not in self._prompts:
            entry = {"request": self._first + request, "tokens": 0, "sha256": None}
            self._prompts[request] = entry
            self.prompts.append(entry)
        return self._prompts[request]

    def _key(self, event: events.SelectionEvent | events.RecallEvent | events.AuditEvent) -> dict[str, int]:
        request = self._first + event.request
        return {"request": request, "step": event.step, "layer": event.layer}

    def _texts(self, table: str, request: int, ids: list[int]) -> Array | None:
        # what tokens add to the text of a request's prompt, or of its answer
        if self._text is None:
            return None
        text = self._sequences.setdefault((table, request), self._text.another())
        return _objects(map(text, ids))


def _objects(texts: Iterable[str]) -> Array:
    return np.array(list(texts), object)


def _overlap(first: Array | None, second: Array) -> Array | float:
    return np.nan if first is None else Overlap.of(first, second).coefficient


class TokenText:
    """Text of one token after the other. A character that is split over tokens comes with its last token.

    The tokens before have an empty text. A character that the sequence's end cuts off is left out.
    """

    def __init__(self, tokenizer: Any, whole: dict[int, str | None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._whole: dict[int, str | None] = {} if whole is None else whole
        self._parts: list[int] = []  # tokens of a character that is not whole yet

    def another(self) -> Self:
        """Begin another sequence of this tokenizer's tokens."""
        return type(self)(self._tokenizer, self._whole)

    def __call__(self, token_id: int) -> str:
        """Return what the sequence's next token adds to its text."""
        parts, whole = self._parts, self._look_up(token_id)
        if whole is not None:
            self._parts = []
            return self._decode(parts) + whole if parts else whole
        parts.append(token_id)
        text = self._decode(parts)
        if text.endswith(REPLACEMENT) and not text.endswith(MOST * REPLACEMENT):
            return ""
        self._parts = []
        return text

    def alone(self, token_id: int) -> str:
        """Return the text of a token by itself: U+FFFD stands for a part of a character."""
        whole = self._look_up(token_id)
        return self._decode([token_id]) if whole is None else whole

    def _look_up(self, token_id: int) -> str | None:
        # None for a token with only some bytes of a character
        if token_id not in self._whole:
            alone = self._decode([token_id])
            # SentencePiece drops a text's first space: take what a second copy of the token adds
            whole = None if REPLACEMENT in alone else self._decode([token_id, token_id])[len(alone) :]
            self._whole[token_id] = whole
        return self._whole[token_id]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
