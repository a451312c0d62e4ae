"""Decode samples of tasks under many methods: each prompt is read once, each method decodes from it."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sfi_core.errors import ConfigError, InputError, MemoryForecastError, NumericsError
from sfi_core.generation.generate import generate
from sfi_core.generation.prompts import check_lengths
from sfi_core.generation.read_prompt import read_prompt
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.method import Method, MethodVariant, Size, check_distinct
from sfi_core.measure.evaluation.tasks import TaskSample, find_task
from sfi_core.models.load import first_line
from sfi_core.policies import policy_class
from sfi_core.settings.engine import DEFAULTS, EngineOptions

# errors of one method, after which the other methods go on
FAILURES = (MemoryForecastError, NumericsError, torch.OutOfMemoryError, MemoryError)
Key = tuple[Any, ...]
MEASURED = (
    "score", "scores", "generated", "finish_reason", "read_ratio", "selection_ratio", "stored_ratio",
    "slow_steps", "fast_steps", "decode_seconds", "tokens_per_second", "text",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGrid:
    """The rows of a run: every method at every size on every sample.

    Attributes:
        methods: The methods that decode; a method with its own size runs once a sample.
        sizes: How much a fast step may read.
        tasks: Names from `sfi_core.measure.evaluation.tasks.TASKS`.
        lengths: Tokens of the prompts.
        seeds: Seeds; each gives a sample of every task and length.
        table: The table of the rows.
    """

    methods: tuple[Method, ...]
    sizes: tuple[Size, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    table: ClassVar[str] = "samples"

    def __post_init__(self) -> None:
        """Reject an empty grid, and one with two methods or sizes of one name.

        Raises:
            ConfigError: The grid is one of these, or a task is unknown.
        """
        check_distinct(
            {
                "method": [method.label for method in self.methods],
                "size": [size.label for size in self.sizes],
                "task": self.tasks,
                "length": self.lengths,
                "sample": self.seeds,
            }
        )
        if min(self.lengths) < 1:
            raise ConfigError(f"length must be positive, got {min(self.lengths)}")
        for task in self.tasks:
            find_task(task)

    @property
    def variants(self) -> list[MethodVariant]:
        """The methods at their sizes, each of which decodes every sample."""
        return [one for method in self.methods for one in method.variants(self.sizes)]

    def samples(self) -> Iterator[tuple[str, int, int]]:
        """Yield task, length and seed of each sample, seed by seed: a cut run has all tasks and lengths."""
        for seed in self.seeds:
            for length in self.lengths:
                for task in self.tasks:
                    yield task, length, seed

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows, in the order in which they come."""
        return [(*one.key, *sample) for sample in self.samples() for one in self.variants]

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""
        return row["method"], row["size"], row["task"], row["length"], row["seed"]

    def weight(self, key: Key) -> int:
        """Return the context of a row, which its time grows with."""
        return int(key[3])

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, contexts that the model cannot hold and sizes that select nothing.

        Raises:
            InputError: With the length and the model's limit.
            ConfigError: With the share and the context.
        """
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and max(self.lengths) > limit:
            raise InputError(
                f"length must be at most the model's {limit} positions, got {max(self.lengths)}"
            )
        for length in self.lengths:
            for task in self.tasks:
                sample = find_task(task).sample(tokenizer, length, self.seeds[0])
                check_lengths(model, [sample.prompt_ids], sample.max_new_tokens)
                for one in self.variants:
                    one.config(len(sample.prompt_ids))

    def run(
        self,
        model: Any,
        tokenizer: Any,
        done: AbstractSet[Key] = frozenset(),
        *,
        backend: str = "auto",
        prefill_chunk: int = 0,
        engine: EngineOptions = DEFAULTS,
    ) -> Iterator[dict[str, Any]]:
        """Decode greedily and yield one plain row for each method, size and sample.

        Args:
            model: A decoder-only model of transformers; `check` it first.
            tokenizer: Its tokenizer.
            done: Keys of rows that are not made again.
            backend: "auto", "torch" or "triton".
            prefill_chunk: Prompt tokens of one forward pass; 0 for all at once.
            engine: How steps are run; a policy that cannot run under its device budget runs without it.

        Yields:
            Rows; a method that ran out of memory or gave broken logits has an `error` and no score.

        Raises:
            KeyboardInterrupt: On Ctrl-C; the row under way is lost.
        """
        options: dict[str, Any] = {"backend": backend, "prefill_chunk": prefill_chunk}
        methods = [method.resolved(tokenizer) for method in self.methods]
        variants = [one for method in methods for one in method.variants(self.sizes)]
        for task, length, seed in self.samples():
            pending = [one for one in variants if (*one.key, task, length, seed) not in done]
            if not pending:
                continue
            sample = find_task(task).sample(tokenizer, length, seed)
            try:
                shared = read_prompt(
                    model,
                    tokenizer,
                    [sample.prompt_ids],
                    capacity=len(sample.prompt_ids) + sample.max_new_tokens,
                    window=_window([one.method for one in pending]),
                    **options,
                )
            except FAILURES as error:
                yield from (_row(one, sample) | {"error": first_line(error)} for one in pending)
                continue
            for one in pending:
                own = engine_for(one.method.policy, engine)
                more = {**options, "shared": shared, "engine": own}
                yield _decoded(model, tokenizer, one, sample, more)


def _window(methods: list[Method]) -> int | None:
    # the queries of the prompt that these methods look at; None for all of them
    policies = [(policy_class(method.policy), method.config) for method in methods]
    if any(policy.observes_prompt for policy, _ in policies):
        return None
    return max(policy.adapt(config).window_prefill for policy, config in policies)


def _decoded(
    model: Any,
    tokenizer: Any,
    variant: MethodVariant,
    sample: TaskSample,
    options: dict[str, Any],
) -> dict[str, Any]:
    # decode one sample by one method and score it
    prompt, row = sample.prompt_ids, _row(variant, sample)
    try:
        result = generate(
            model,
            tokenizer,
            [prompt],
            variant.config(len(prompt)),
            policy=variant.method.policy,
            max_new_tokens=sample.max_new_tokens,
            **options,
        )
    except FAILURES as error:
        return row | {"error": first_line(error)}
    if result.interrupted:
        raise KeyboardInterrupt
    if result.error is not None:
        return row | {"error": first_line(result.error)}
    report, text = result.report.requests[0], result.texts[0]
    scores = dict(find_task(sample.task).score(sample, report.token_ids, text, tokenizer))
    return row | {
        "score": float(scores.pop("score")),
        "scores": scores,
        "generated": len(report.token_ids),
        "finish_reason": report.finish_reason,
        "read_ratio": report.read_ratio,
        "selection_ratio": report.selection_ratio,
        "stored_ratio": report.stored_ratio,
        "slow_steps": report.slow_steps,
        "fast_steps": report.fast_steps,
        "decode_seconds": result.report.decode_seconds,
        "tokens_per_second": result.report.decode_tokens_per_second,
        "text": text,
    }


def _row(variant: MethodVariant, sample: TaskSample) -> dict[str, Any]:
    # the columns known before decoding; every row has them in this order
    return {
        **variant.columns(len(sample.prompt_ids)),
        "task": sample.task,
        "length": sample.length,
        "seed": sample.seed,
        "prompt_tokens": len(sample.prompt_ids),
        **dict.fromkeys(MEASURED),
        "scores": {},
        "expected": list(sample.answers),
        "error": None,
    }
