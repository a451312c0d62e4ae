"""Distance of a policy's next-token distributions from full attention's, on windows of any text.

A window of the text is a prompt and a continuation. The continuation is decoded twice with its own tokens,
under full attention and under the policy, so that both predict the same token from the same history.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import product
from typing import Any, Self

import torch

from sfi_core.engine.audit import divergence
from sfi_core.engine.report import RequestReport
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError, InputError
from sfi_core.generation.generate import read_prompt
from sfi_core.generation.prompts import text_ids
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.grid import WHOLE, Cell, Method, Place, Row, Rows, check_distinct
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions

RATIOS = ("read_ratio", "selection_ratio", "stored_ratio")


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

    Each starts with the special tokens `prefix`, part of its prompt. Raise `InputError` if the text is too short.
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


@dataclass(slots=True, kw_only=True)
class Fidelity:
    """Measures of the steps of some windows; lists with an entry per step."""

    window: list[int] = field(default_factory=list)  # the window's start
    # decoding step; 0 is the prompt's last position, the same under every policy
    step: list[int] = field(default_factory=list)
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
        """Average over all steps but each window's step 0, which is dense under every policy; `kl` is in nats."""
        decoded, reports = [index for index, step in enumerate(self.step) if step > 0], self.reports

        def mean(values: Sequence[float]) -> float:
            return _mean(values[index] for index in decoded)

        kl = sorted(self.kl[index] for index in decoded)
        return {
            "windows": len(reports),
            "steps": len(decoded),
            "slow_rate": mean(self.slow),
            "kl": mean(self.kl),
            "agreement": mean(self.agrees),
            "perplexity": math.exp(mean(self.nll)),
            "perplexity_full": math.exp(mean(self.nll_full)),
            # the smallest value that at least this share of the values do not exceed
            "kl_p95": kl[math.ceil(0.95 * len(kl)) - 1] if kl else math.nan,
            **{name: _mean(getattr(report, name) for report in reports) for name in RATIOS},
        }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


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
    alike = EngineOptions(backend=engine.backend, graphs=engine.graphs)  # in bfloat16 compiled steps round elsewhere
    how: dict[str, Any] = {"policy": WHOLE, "engine": alike, "shared": shared}
    teacher_force(model, tokenizer, texts, prompt_tokens, keep, config, **how)
    return Reference(windows, torch.stack(rows), shared)


def fidelity(
    model: Any, tokenizer: Any, full: Reference, config: SfiConfig | None = None, *, policy: str = "sfi",
    engine: EngineOptions = DEFAULTS, **watched: Any,
) -> list[Fidelity]:  # fmt: skip
    """Compare a policy with full attention on windows that are decoded together.

    `watched` are `teacher_force`'s `observers` and `audit`. Raise as it.
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
    how: dict[str, Any] = {"policy": policy, "engine": engine, "shared": full.shared, **watched}
    report = teacher_force(model, tokenizer, texts, prompt_tokens, compare, config, **how)
    for part, window, request in zip(parts, full.windows, report.requests, strict=True):
        slow = set(request.slow_at)
        part.slow = [step in slow for step in part.step]
        part.window = [window.start] * len(part.step)
        part.reports = [request]
    return parts


def window_cells(methods: Sequence[Method], lengths: Sequence[int], count: int, tokens: int) -> list[Cell]:
    """List every method but full attention on `count` windows of each length, the first window of all first."""
    check_distinct("length", lengths)
    compared = [method for method in methods if method.policy != WHOLE]
    if not compared:
        raise ConfigError(f"fidelity must have a method besides {WHOLE}, got none")
    # the first token is the same under every method: the prompt is read densely
    for name, value, least in (("tokens", tokens, 2), ("windows", count, 1)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    grid = product(range(count), lengths, compared)
    return [Cell(method=method, length=length, number=number) for number, length, method in grid]


class WindowRows(Rows[Window]):
    """Makes the rows of windows: a continuation is decoded with its own tokens; an entry of `steps` a step."""

    def __init__(
        self, model: Any, tokenizer: Any, engine: EngineOptions = DEFAULTS, *, text: str, tokens: int, count: int
    ) -> None:
        """Take a text and how it is cut: into `count` windows of each length, with `tokens` that are decoded."""
        super().__init__(model, tokenizer, engine)
        self._text, self._tokens, self._count = text, tokens, count
        self.windows = cache(self._windows)

    def _windows(self, length: int) -> list[Window]:
        # spread over the text; `InputError` if the text is too short
        ids, prefix = ids_and_prefix(self.tokenizer, self._text)
        return windows(ids, length, self._tokens, self._count, prefix)

    def check(self, cells: Sequence[Cell]) -> None:
        """See `Rows`."""
        limit = self.positions(cells)
        for length in dict.fromkeys(cell.length for cell in cells):
            whole = len(self.windows(length)[0].ids)
            if limit is not None and whole > limit:
                raise InputError(
                    f"fidelity of length {length} must fit the model's {limit} positions, "
                    f"got {length} prompt and {whole - length} new tokens"
                )
        for cell in cells:
            cell.method.config_for(cell.length)

    def draw(self, place: Place) -> Window:
        """Return a window."""
        number, length, _ = place
        return self.windows(length)[number]

    def read(self, prompt: Window, methods: Sequence[Method]) -> Reference:
        """Decode the window under full attention."""
        return reference(self.model, self.tokenizer, [prompt], engine=self.engine)

    def decode(self, shared: Reference, method: Method, prompt: Window) -> Row:
        """Decode the window by one method, and compare."""
        (part,) = fidelity(
            self.model, self.tokenizer, shared, method.config_for(prompt.prompt_tokens),
            policy=method.policy, engine=engine_for(method.policy, self.engine),
        )  # fmt: skip
        values = asdict(part)
        (report,) = values.pop("reports")
        return {"steps": values, "report": report}

    def empty(self, method: Method, prompt: Window) -> Row:
        """See `Rows`."""
        return {
            **method.columns(prompt.prompt_tokens),
            "length": prompt.prompt_tokens,
            "tokens": self._tokens,
            "window": prompt.number,
            "steps": None,
            "report": None,
        }


def from_rows(rows: Sequence[Mapping[str, Any]]) -> Fidelity:
    """Join the steps of the windows of some rows; fields of another version are left out."""
    return Fidelity.join(
        Fidelity(**_known(Fidelity, row["steps"]), reports=[RequestReport(**_known(RequestReport, row["report"]))])
        for row in rows
    )


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {column.name for column in fields(kind) if column.init}
    return {name: value for name, value in values.items() if name in names}
