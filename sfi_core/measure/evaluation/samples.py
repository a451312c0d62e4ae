"""Decode samples of tasks: each prompt is read once, and every method decodes from the shared cache."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError, InputError
from sfi_core.generation.generate import generate, read_prompt
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.grid import Cell, Method, Place, Row, Rows, check_distinct
from sfi_core.measure.evaluation.questions import TaskSample
from sfi_core.measure.evaluation.tasks import find_task
from sfi_core.policies import policy_class
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.triggers.trigger import resolve_triggers

REPORTED = (
    "finish_reason", "read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps",
    "decode_seconds", "token_ids",
)  # fmt: skip
MEASURED = ("score", "generated", "tokens_per_second", "text", *REPORTED)


def sample_cells(
    methods: Sequence[Method], tasks: Sequence[str], lengths: Sequence[int], seeds: Sequence[int]
) -> list[Cell]:
    """List every method on every sample, by seed, so that a stopped run has all tasks and lengths."""
    for name, values in {"length": lengths, "task": tasks, "sample": seeds}.items():
        check_distinct(name, values)
    if min(lengths) < 1:
        raise ConfigError(f"length must be positive, got {min(lengths)}")
    for task in tasks:
        find_task(task)
    return [
        Cell(method=method, length=length, number=seed, task=task)
        for seed, length, task, method in product(seeds, lengths, tasks, methods)
    ]


class SampleRows(Rows[TaskSample]):
    """Makes the rows of samples."""

    def __init__(self, model: Any, tokenizer: Any, engine: EngineOptions = DEFAULTS) -> None:
        super().__init__(model, tokenizer, engine)
        self._trigger_ids = cache(partial(resolve_triggers, tokenizer))  # of settings; looking them up takes a while

    def check(self, cells: Sequence[Cell]) -> None:
        """See `Rows`."""
        methods = {cell.method.key: cell.method for cell in cells}.values()
        for method in methods:
            self._trigger_ids(method.config)
        limit, seeds = self.positions(cells), dict.fromkeys(cell.number for cell in cells)
        for length, name in dict.fromkeys((cell.length, cell.task) for cell in cells):
            samples = (find_task(name).sample(self.tokenizer, length, seed) for seed in seeds)
            first = next(samples)
            for method in methods:
                method.config_for(len(first.prompt_ids))
            # the first seed alone, unless the length is so near the limit that a longer answer might not fit
            near = limit is not None and length + 2 * first.max_new_tokens > limit
            for sample in (first, *samples) if near else ():
                prompt, new = len(sample.prompt_ids), sample.max_new_tokens
                if limit is not None and prompt + new > limit:
                    raise InputError(
                        f"task {name!r} of length {length} must fit the model's {limit} positions, "
                        f"got {prompt} prompt and {new} new tokens"
                    )

    def draw(self, place: Place) -> TaskSample:
        """Draw a sample."""
        number, length, task = place
        return find_task(task).sample(self.tokenizer, length, number)

    def read(self, prompt: TaskSample, methods: Sequence[Method]) -> SharedPrompt:
        """Read the prompt, with room for the answer."""
        configs = [policy_class(method.policy).adapt(method.config) for method in methods]
        return read_prompt(
            self.model, self.tokenizer, [prompt.prompt_ids],
            capacity=len(prompt.prompt_ids) + prompt.max_new_tokens,
            window=max(config.window_prefill for config in configs), engine=self.engine,
        )  # fmt: skip

    def decode(self, shared: SharedPrompt, method: Method, prompt: TaskSample) -> Row:
        """Decode a sample by one method and score the answer."""
        config = method.config_for(len(prompt.prompt_ids)).replace(trigger_token_ids=self._trigger_ids(method.config))
        result = generate(
            self.model, self.tokenizer, [prompt.prompt_ids], config, policy=method.policy,
            max_new_tokens=prompt.max_new_tokens, shared=shared, engine=engine_for(method.policy, self.engine),
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        if result.error is not None:
            raise result.error
        (report,), (text,) = result.report.requests, result.texts
        scores = dict(find_task(prompt.task).score(prompt, report.token_ids, text, self.tokenizer))
        return {
            **{name: getattr(report, name) for name in REPORTED},
            "score": float(scores.pop("score")),
            "scores": scores,
            "generated": len(report.token_ids),
            "text": text,
            "tokens_per_second": result.report.steady_tokens_per_second,
        }

    def empty(self, method: Method, prompt: TaskSample) -> Row:
        """See `Rows`."""
        return {
            **method.columns(len(prompt.prompt_ids)),
            "task": prompt.task,
            "length": prompt.length,
            "seed": prompt.seed,
            "prompt_tokens": len(prompt.prompt_ids),
            **dict.fromkeys(MEASURED),
            "scores": {},
            "expected": list(prompt.answers),
        }
