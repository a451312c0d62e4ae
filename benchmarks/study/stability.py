"""Part `stability`: whether supports keep within a sentence and move at its end (SFI, Figures 1 and 2)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.study.listed import FULL
from benchmarks.study.records import Key, plain
from benchmarks.study.sentences import by_place, statistics
from benchmarks.study.supports import Recorder, Shared, audit_for
from benchmarks.study.texts import Place, window
from sfi_core.generation.generate import generate
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.measure.evaluation.text_windows import Window, sentence_positions
from sfi_core.settings.config import SfiConfig
from sfi_core.triggers.trigger_set import resolve_triggers

MODES = ("forced", "free")
SIZES = (64, 256)


@dataclass(frozen=True, slots=True)
class StabilityPart:
    """The rows of a window: for each mode and size of a support, what its supports have in common.

    Attributes:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer.
        name: What rows call the model.
        tokens: Decoded tokens of a window.
        modes: "forced" decodes the text, "free" what the model itself says, greedily.
        sizes: Positions of a support.
    """

    model: Any
    tokenizer: Any
    name: str
    tokens: int
    modes: Sequence[str] = MODES
    sizes: Sequence[int] = SIZES

    def keys(self, place: Place) -> list[Key]:
        """Return the keys of a window's rows."""
        return [
            key({**self._where(place), "mode": mode, "size": size})
            for mode in self.modes
            for size in self.sizes
        ]

    def make(self, place: Place, pending: set[Key]) -> Iterator[dict[str, Any]]:
        """Decode a window under full attention with an audit of every step, and sum its supports up.

        Raises:
            InputError: The half of the kind has no such window.
        """
        for mode in self.modes:
            wanted = {
                size: {**self._where(place), "mode": mode, "size": size} for size in self.sizes
            }
            wanted = {size: row for size, row in wanted.items() if key(row) in pending}
            if not wanted:
                continue
            began = time.monotonic()
            seen, decoded = self._record(place, mode)
            ends = resolve_triggers(self.tokenizer, SfiConfig())
            place_N = np.array(sentence_positions(decoded, frozenset(ends)))
            for size, row in wanted.items():
                shared = Shared.of(seen, place.length, size)
                found = statistics(shared, place_N, seed=place.number)
                yield (
                    row
                    | plain(found | self._more(seen, decoded, place_N))
                    | {"seconds": round(time.monotonic() - began, 1)}
                )

    def _record(self, place: Place, mode: str) -> tuple[Recorder, Window]:
        given = window(self.tokenizer, place, self.tokens)
        seen, audit = Recorder(), audit_for(self.tokens, self.sizes)
        prompt = given.ids[: place.length]
        if mode == "forced":
            teacher_force(
                self.model, self.tokenizer, [given.ids], place.length, _ignore,
                SfiConfig(trigger_policy="always"), policy=FULL, observers=[seen], audit=audit,
            )  # fmt: skip
            return seen, given
        result = generate(
            self.model, self.tokenizer, [prompt], policy=FULL, max_new_tokens=self.tokens,
            stop_token_ids=(), observers=[seen], audit=audit,
        )  # fmt: skip
        own = result.report.requests[0].token_ids
        return seen, replace(given, ids=(*prompt, *own))

    def _more(self, seen: Recorder, decoded: Window, place_N: Any) -> dict[str, Any]:
        cosine_NLH = seen.cosines()[1:]
        return {
            "start": decoded.start,
            "cosine_layers": cosine_NLH.mean((0, 2)).tolist(),
            "cosine_places": by_place(cosine_NLH.mean((1, 2)), place_N[1:]),
            "tokens_read": list(decoded.ids[decoded.prompt_tokens - 1 : -1]),
        }

    def _where(self, place: Place) -> dict[str, Any]:
        return {"model": self.name, **place.columns(), "tokens": self.tokens}


def key(row: Mapping[str, Any]) -> Key:
    """Return what tells a row from others."""
    names = ("model", "kind", "half", "text", "length", "tokens", "number", "mode", "size")
    return tuple(row[name] for name in names)


def _ignore(step: int, logits_V: Any) -> None:
    """Take no note of the logits."""
