"""Part `lossless`: what drafts of each method, rule and evidence keep, and what a lossless run reads."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.listed import FULL, Listed
from benchmarks.study.long import first_difference, repeats
from benchmarks.study.records import Key, plain, short
from benchmarks.study.texts import Place, window
from benchmarks.study.work import FAILURES
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.generation.generate import generate
from sfi_core.generation.read_prompt import read_prompt
from sfi_core.models.load import first_line
from sfi_core.settings.engine import EngineOptions
from sfi_core.settings.parts import DraftConfig


@dataclass(frozen=True, slots=True)
class LosslessPart:
    """The rows of a window: one of full attention's greedy answer, one for each method and share.

    Attributes:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer.
        name: What rows call the model.
        methods: Methods at their shares; settings of `draft` say how they draft.
        tokens: Tokens of an answer.
    """

    model: Any
    tokenizer: Any
    name: str
    methods: Sequence[Listed]
    tokens: int

    def keys(self, place: Place) -> list[Key]:
        """Return the keys of a window's rows."""
        return [key(row) for row in self._rows(place)]

    def make(self, place: Place, pending: set[Key]) -> Iterator[dict[str, Any]]:
        """Read the prompt once, and answer under full attention and under every pending method.

        Raises:
            InputError: The half of the kind has no such window.
        """
        first, *rows = self._rows(place)
        given = window(self.tokenizer, place, self.tokens)
        prompt = list(given.ids[: place.length])
        shared = read_prompt(
            self.model, self.tokenizer, [prompt], capacity=place.length + self.tokens
        )
        answer = self._run(prompt, shared, FULL, None).token_ids
        alone: dict[Any, dict[str, Any]] = {}
        if key(first) in pending:
            yield first | {"start": given.start, "repeats": repeats(answer)}
        for one, row in zip(self.methods, rows, strict=True):
            if key(row) in pending:
                yield row | self._measured(one, prompt, shared, answer, alone)

    def _rows(self, place: Place) -> list[dict[str, Any]]:
        where = {"model": self.name, **place.columns(), "tokens": self.tokens}
        which = [(FULL, None), *((one.text, one.share) for one in self.methods)]
        return [{**where, "method": method, "share": share} for method, share in which]

    def _run(
        self, prompt: list[int], shared: SharedPrompt, policy: str, config: Any, **more: Any
    ) -> Any:
        result = generate(
            self.model, self.tokenizer, [prompt], config, policy=policy,
            max_new_tokens=self.tokens, stop_token_ids=(), shared=shared, **more,
        )  # fmt: skip
        return result.report.requests[0]

    def _measured(
        self,
        one: Listed,
        prompt: list[int],
        shared: SharedPrompt,
        answer: list[int],
        alone: dict[Any, dict[str, Any]],
    ) -> dict[str, Any]:
        # `alone` keeps what each method reads and does by itself, whatever drafts
        began = time.monotonic()
        policy, config = one.variant.method.policy, one.variant.config(len(prompt))
        try:
            ours = self._run(prompt, shared, policy, config, engine=EngineOptions(lossless=True))
            method = policy, config.replace(draft=DraftConfig())
            if method not in alone:
                plain_run = self._run(prompt, shared, policy, config)
                alone[method] = {
                    "plain_read": plain_run.read_ratio,
                    "plain_first_difference": first_difference(answer, plain_run.token_ids),
                }
        except FAILURES as error:
            return {"error": first_line(error)}
        row: dict[str, Any] = plain(
            {
                "same": ours.token_ids == answer,
                "verifications": ours.lossless.verifications,
                "drafted": ours.lossless.drafted,
                "tested": ours.lossless.tested,
                "accepted": ours.lossless.accepted,
                "passes": ours.lossless.passes_per_token,
                "reasons": ours.reasons,
                "read": ours.read_ratio,
                "selecting": ours.selection_ratio,
                **alone[method],
                "seconds": short(time.monotonic() - began, 3),
            }
        )
        return row


def key(row: Mapping[str, Any]) -> Key:
    """Return what tells a row from others."""
    names = ("model", "kind", "half", "text", "length", "tokens", "number", "method", "share")
    return tuple(row[name] for name in names)
