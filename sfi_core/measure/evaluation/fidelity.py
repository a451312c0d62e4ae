"""Distance of a policy's next-token distributions from full attention's, on windows of any text.

A window of the text is a prompt and a continuation. The continuation is decoded twice with its own tokens,
under full attention and under the policy, so that both predict the same token from the same history.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch

from sfi_core.engine.audit import divergence
from sfi_core.engine.report import RequestReport
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import InputError
from sfi_core.generation.generate import read_prompt
from sfi_core.generation.prompts import text_ids
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.triggers.trigger import resolve_triggers

FULL = "full-kv"
EDGES = (0, 1, 2, 4, 8, 16, 32)  # where groups of positions in a sentence begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A piece of a text."""

    start: int  # the index of the window's first token in the text
    prompt_tokens: int  # tokens that are read as a prompt
    ids: tuple[int, ...]  # the window's tokens, after the prefix that every window starts with
    number: int = 0  # its place among the windows of a text


def windows(
    ids: Sequence[int], prompt_tokens: int, new_tokens: int, count: int, prefix: Sequence[int] = ()
) -> list[Window]:
    """Spread windows evenly over a text; in a short text the windows overlap.

    Every window starts with the special tokens `prefix`, which count as tokens of its prompt. Raise `InputError` if
    the text is too short.
    """
    size = prompt_tokens + new_tokens - len(prefix)
    spare = len(ids) - size
    if spare + 1 < count or prompt_tokens <= len(prefix):
        raise InputError(
            f"text must have at least {size + count - 1} tokens for {count} windows of {prompt_tokens} "
            f"prompt and {new_tokens} new tokens, got {len(ids)}"
        )
    starts = [round(index * spare / max(1, count - 1)) for index in range(count)]
    return [
        Window(start=start, prompt_tokens=prompt_tokens, ids=(*prefix, *ids[start : start + size]), number=number)
        for number, start in enumerate(starts)
    ]


def ids_and_prefix(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return a text's own tokens, and the special tokens that the tokenizer puts before a text."""
    start, first = tokenizer.bos_token_id, text_ids(tokenizer, "a")[:1]
    return text_ids(tokenizer, text, special=False), first if start is not None and first == [start] else []


def sentence_positions(window: Window, ends: Collection[int]) -> list[int]:
    """Return for each step the tokens since the last one among `ends`, in the prompt or decoded."""
    last, steps_since = 0, []
    for place, token in enumerate(window.ids[:-1]):
        last = place if token in ends else last
        if place >= window.prompt_tokens - 1:
            steps_since.append(place - last)
    return steps_since


@dataclass(slots=True, kw_only=True)
class Fidelity:
    """Measures of the steps of some windows; lists with an entry per step."""

    window: list[int] = field(default_factory=list)  # the window's start
    # decoding step; 0 is the prompt's last position, the same under every policy
    step: list[int] = field(default_factory=list)
    # steps since the last step whose input token ended a sentence. 0 is that step itself, which Eq. 5 makes slow.
    # Before the first such step, the steps since the window's start
    in_sentence: list[int] = field(default_factory=list)
    slow: list[bool] = field(default_factory=list)  # whether the step was slow
    kl: list[float] = field(default_factory=list)  # KL(full attention || policy) of the next token, nats
    agrees: list[bool] = field(default_factory=list)  # whether the same token is most likely under both
    nll: list[float] = field(default_factory=list)  # negative log-likelihood of the text's token under the policy, nats
    # negative log-likelihood of the text's token under full attention, nats
    nll_full: list[float] = field(default_factory=list)
    # the policy's report of each window; an entry per window
    reports: list[RequestReport] = field(default_factory=list)

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """Put the steps of several windows together."""
        whole = cls()
        for part in parts:
            for name in cls.__slots__:
                getattr(whole, name).extend(getattr(part, name))
        return whole

    def summary(self) -> dict[str, float]:
        """Average over all steps but step 0 of each window, which is dense under every policy.

        Returns:
            `windows`, `steps`, `slow_rate`, `kl` (mean, nats), `kl_p95`, `agreement`, `perplexity`,
            `perplexity_full`, and the windows' mean `read_ratio`, `selection_ratio` and `stored_ratio`.
        """
        decoded = [index for index, step in enumerate(self.step) if step > 0]
        kl, reports = sorted(self.kl[index] for index in decoded), self.reports
        return {
            "windows": len(reports),
            **self._over(decoded),
            # the smallest value that at least this share of the values do not exceed
            "kl_p95": kl[math.ceil(0.95 * len(kl)) - 1] if kl else math.nan,
            "read_ratio": _mean(report.read_ratio for report in reports),
            "selection_ratio": _mean(report.selection_ratio for report in reports),
            "stored_ratio": _mean(report.stored_ratio for report in reports),
        }

    def by_sentence_position(self) -> list[dict[str, Any]]:
        """Average by position in the sentence: 0, 1, 2-3, 4-7, 8-15, 16-31, 32+."""
        rows = []
        for low, high in pairwise((*EDGES, math.inf)):
            chosen = [i for i, place in enumerate(self.in_sentence) if low <= place < high and self.step[i] > 0]
            if chosen:
                rows.append({"position": _label(low, high), "first": low, **self._over(chosen)})
        return rows

    def _over(self, chosen: Collection[int]) -> dict[str, float]:
        return {
            "steps": len(chosen),
            "slow_rate": _mean(self.slow[i] for i in chosen),
            "kl": _mean(self.kl[i] for i in chosen),
            "agreement": _mean(self.agrees[i] for i in chosen),
            "perplexity": math.exp(_mean(self.nll[i] for i in chosen)),
            "perplexity_full": math.exp(_mean(self.nll_full[i] for i in chosen)),
        }


@dataclass(frozen=True, slots=True)
class Reference:
    """Full attention's predictions for windows of one length."""

    windows: Sequence[Window]
    log_SBV: torch.Tensor  # next-token log-probabilities, [S, B, V] float32
    shared: SharedPrompt  # the prompts, read once for all policies


def reference(model: Any, tokenizer: Any, windows: Sequence[Window], engine: EngineOptions = DEFAULTS) -> Reference:
    """Read prompts of one length, and decode their continuations under full attention.

    Raise `SfiError` as `read_prompt` and `teacher_force`.
    """
    prompt_tokens, size = windows[0].prompt_tokens, len(windows[0].ids)
    prompts = [window.ids[:prompt_tokens] for window in windows]
    shared = read_prompt(model, tokenizer, prompts, capacity=size, engine=engine)
    rows: list[torch.Tensor] = []

    def keep(_: int, logits_BV: torch.Tensor) -> None:
        rows.append(logits_BV.log_softmax(-1))

    texts, config = [window.ids for window in windows], SfiConfig(trigger_policy="always")
    how: dict[str, Any] = {"policy": FULL, "engine": EngineOptions(backend=engine.backend), "shared": shared}
    teacher_force(model, tokenizer, texts, prompt_tokens, keep, config, **how)
    return Reference(windows, torch.stack(rows), shared)


def fidelity(
    model: Any, tokenizer: Any, full: Reference, config: SfiConfig | None = None, *, policy: str = "sfi",
    engine: EngineOptions = DEFAULTS,
) -> list[Fidelity]:  # fmt: skip
    """Compare a policy with full attention on windows that are decoded together.

    A sentence ends with a trigger token. The policy runs on the backend of `full`. Raise `SfiError` as
    `teacher_force`.
    """
    config, prompt_tokens = config or SfiConfig(), full.windows[0].prompt_tokens
    given = [window.ids[prompt_tokens:] for window in full.windows]
    parts = [Fidelity() for _ in full.windows]

    def compare(step: int, logits_BV: torch.Tensor) -> None:
        log_BV = logits_BV.log_softmax(-1)
        for part, ids, log_V, full_V in zip(parts, given, log_BV, full.log_SBV[step], strict=True):
            token = ids[step]
            part.step.append(step)
            part.kl.append(float(divergence(full_V.double(), log_V.double())))
            part.agrees.append(bool(log_V.argmax() == full_V.argmax()))
            part.nll.append(-float(log_V[token]))
            part.nll_full.append(-float(full_V[token]))

    texts = [window.ids for window in full.windows]
    how: dict[str, Any] = {"policy": policy, "engine": engine, "shared": full.shared}
    report = teacher_force(model, tokenizer, texts, prompt_tokens, compare, config, **how)
    ends = frozenset(resolve_triggers(tokenizer, config.replace(trigger_policy="boundary")))
    for part, window, request in zip(parts, full.windows, report.requests, strict=True):
        slow = set(request.slow_at)
        part.slow = [step in slow for step in part.step]
        part.in_sentence = sentence_positions(window, ends)
        part.window = [window.start] * len(part.step)
        part.reports = [request]
    return parts


def _label(low: float, high: float) -> str:
    if high == math.inf:
        return f"{low:.0f}+"
    return f"{low:.0f}" if high == low + 1 else f"{low:.0f}-{high - 1:.0f}"


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan
