"""Writes the tables of an imported trace; null stands for what the file does not say."""

from typing import Any

import numpy as np

from sfi_traces.importing.schema import Header, ImportedStep, Prompt
from sfi_traces.overlap import SelectedSets
from sfi_traces.record.part_files import Lists, PartFiles, TableBuffer
from sfi_traces.record.token_text import TokenText
from sfi_traces.schema import TABLES

REASON = "imported"  # of every step, since all are slow
PART_BYTES = 64 << 20


class TraceTables:
    """Turns a file's steps into rows, and writes parts as they fill; `top` counts a row's most positions."""

    def __init__(self, parts: PartFiles, header: Header, triggers: frozenset[int], text: TokenText | None) -> None:
        """Start without rows; `triggers` is T_trig, `text` gives a token's text where the file has none."""
        self.top = 0
        self._parts, self._header, self._triggers, self._text = parts, header, triggers, text
        self._tables = {name: TableBuffer(schema) for name, schema in TABLES.items()}
        self._layer_U, self._head_U = np.array(header.place_U).T
        self._begin()

    def prompt(self, request: int, prompt: Prompt) -> None:
        """Begin a request with its prompt."""
        self._begin()
        if prompt.token_ids is None:
            return
        texts = prompt.texts
        if texts is None and self._text is not None:
            texts = list(map(self._text.another(), prompt.token_ids.tolist()))
        columns = {
            "request": request,
            "position": np.arange(prompt.tokens),
            "token_id": prompt.token_ids,
            "token_text": None if texts is None else np.array(texts, object),
        }
        self._add("prompts", prompt.tokens, columns)

    def step(self, one: ImportedStep) -> None:
        """Add a step."""
        self._add("steps", 1, self._step_row(one))
        self._sentence += one.token_id in self._triggers
        change = self._sets.replace(np.arange(len(self._layer_U)), one.index_UK)
        key = {"request": one.request, "step": one.step, "layer": self._layer_U, "head": self._head_U}
        known_UK = one.index_UK >= 0
        positions = Lists.of(one.index_UK, known_UK)
        supports = {
            **key,
            "positions": positions,
            "mass": None if one.mass_UK is None else Lists.of(one.mass_UK, known_UK),
            "retained_mass": one.retained_U,
            "overlap_previous_step": change["overlap_previous"],
            "overlap_last_refresh": change["overlap_previous"],  # every step refreshed
        }
        self._add("supports", len(known_UK), supports)
        if self._header.kind == "selections":
            selections = {**key, **change, "positions": positions, "reason": ""}
            self._add("selections", len(known_UK), selections)
        self.top = max(self.top, int(change["selected"].max()))
        if sum(table.nbytes for table in self._tables.values()) >= PART_BYTES:
            self.flush()

    def _begin(self) -> None:
        self._sentence, self._sets = 0, SelectedSets(len(self._layer_U))
        self._answer = None if self._text is None else self._text.another()

    def flush(self) -> None:
        """Write the waiting rows; see `PartFiles.flush`."""
        self._parts.flush(self._tables)

    def _step_row(self, one: ImportedStep) -> dict[str, Any]:
        text = one.token_text
        if text is None and self._answer is not None:
            text = self._answer(one.token_id)
        same = ("request", "step", "token_id", "attended_tokens", "context_tokens")
        return {
            **{name: getattr(one, name) for name in same},
            "position": one.context_tokens - 1,
            "token_text": text,
            "slow": True,
            "reason": REASON,
            "steps_since_slow": 0,
            "sentence": self._sentence,
            "trigger": one.token_id in self._triggers,
            "read_ratio": one.attended_tokens / one.context_tokens,
            "audited": True,
            "batch_step": one.step,
            "drafted": False,
        }

    def _add(self, name: str, rows: int, columns: dict[str, Any]) -> None:
        # columns that an import does not know are null
        self._tables[name].add_columns(rows, {**dict.fromkeys(TABLES[name].names), **columns})
