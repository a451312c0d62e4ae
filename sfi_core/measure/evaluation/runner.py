"""Decode samples of tasks: each prompt is read once, and every method decodes from the shared cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any, ClassVar

from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError, InputError
from sfi_core.generation.generate import Result, generate
from sfi_core.generation.read_prompt import read_prompt
from sfi_core.hosts.transformers.lossless import most_together
from sfi_core.hosts.transformers.slow_fast import session_on
from sfi_core.measure.evaluation.grid import Grid, Key, Left, Row, Together, grouped
from sfi_core.measure.evaluation.method import Method, MethodVariant
from sfi_core.measure.evaluation.tasks import TaskSample, find_task
from sfi_core.policies import policy_class
from sfi_core.settings.engine import DEFAULTS, EngineOptions

POOL = 8  # batches of seeds that are searched for prompts of equal budgets
COUNTS = ("verifications", "drafted", "tested", "accepted")
REPORTED = (
    "finish_reason", "read_ratio", "selection_ratio", "stored_ratio", "slow_steps", "fast_steps",
    "decode_seconds", "token_ids",
)  # fmt: skip
MEASURED = (
    "score", "scores", "generated", "finish_reason", "read_ratio", "selection_ratio", "stored_ratio",
    "slow_steps", "fast_steps", *COUNTS, "decode_seconds", "tokens_per_second", "sentence_places",
    "sentence_scores", "text", "token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGrid(Grid):
    """The rows of every method at every size on every sample.

    Attributes:
        tasks: Names from `sfi_core.measure.evaluation.tasks.TASKS`.
        seeds: Each gives a sample of every task and length.
    """

    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    table: ClassVar[str] = "samples"
    place: ClassVar[tuple[str, ...]] = ("task", "length", "seed")

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an empty grid, a value given twice, or an unknown task."""
        self.check_distinct(task=self.tasks, sample=self.seeds)
        if min(self.lengths) < 1:
            raise ConfigError(f"length must be positive, got {min(self.lengths)}")
        for task in self.tasks:
            find_task(task)

    def places(self) -> list[Key]:
        """List task, length and seed of each sample, by seed: a stopped run has all tasks and lengths."""
        return [(task, length, seed) for seed, length, task in product(self.seeds, self.lengths, self.tasks)]

    def check(self, model: Any, tokenizer: Any) -> None:
        """Check the grid before anything runs.

        Raises:
            InputError: A prompt and its answer exceed the model's positions.
            ConfigError: A size selects no token, or a method cannot run losslessly with this model.
        """
        for method in self.methods:
            if method.lossless:
                _together(model, method)
        limit = self.positions_of(model)
        for length, task in product(self.lengths, self.tasks):
            first = self._checked(limit, tokenizer, length, task)
            for one in self.variants:
                one.config(len(first.prompt_ids))

    def _checked(self, limit: int | None, tokenizer: Any, length: int, name: str) -> TaskSample:
        # only the first seed, unless the length is so near the limit that a longer answer might not fit
        task = find_task(name)
        first = task.sample(tokenizer, length, self.seeds[0])
        near = limit is not None and length + 2 * first.max_new_tokens > limit
        others = (task.sample(tokenizer, length, seed) for seed in self.seeds[1:]) if near else ()
        for sample in (first, *others):
            prompt, new = len(sample.prompt_ids), sample.max_new_tokens
            if limit is not None and prompt + new > limit:
                raise InputError(
                    f"task {name!r} of length {length} must fit the model's {limit} positions, "
                    f"got {prompt} prompt and {new} new tokens"
                )
        return first

    def resolved(self, tokenizer: Any) -> list[MethodVariant]:
        """Return the variants with their triggers as token ids."""
        return [one for method in self.methods for one in method.resolved(tokenizer).variants(self.sizes)]

    def rows(self, model: Any, tokenizer: Any, engine: EngineOptions, batch_size: int, left: Left) -> Iterator[Row]:
        """See `Grid`; samples that are decoded together have equal budgets at every size."""
        variants, places = self.resolved(tokenizer), self.places()
        alone = {one.label for one in self.methods if one.lossless and _together(model, one) == 1}
        rows = Together(
            read=partial(_read, model, tokenizer, engine),
            decode=partial(_decode, model, tokenizer, engine),
            empty=empty_row,
            alone=alone,
        )

        @lru_cache(maxsize=POOL * batch_size)
        def drawn(unit: int) -> TaskSample:
            task, length, seed = places[unit]
            return find_task(task).sample(tokenizer, length, seed)

        def sizes(unit: int) -> Key:
            context = len(drawn(unit).prompt_ids)
            configs = [one.config(context) for one in variants]
            return tuple((config.budget, config.recent) for config in configs)

        yield from rows.run(self._batches(batch_size, sizes, left), drawn, left)

    def _batches(self, size: int, alike: Callable[[int], Key], left: Left) -> Iterator[list[int]]:
        # batches of sample numbers of one task, length and `alike`; for size 1 in the order of `places`
        places = len(self.lengths) * len(self.tasks)
        pool = size if size == 1 else POOL * size
        for first in range(0, len(self.seeds), pool):
            seeds = range(first, min(first + pool, len(self.seeds)))
            for place in range(places):
                units = [seed * places + place for seed in seeds]
                if size == 1:
                    yield units
                    continue
                for group in grouped(filter(left, units), alike):
                    yield from (group[at : at + size] for at in range(0, len(group), size))


def _together(model: Any, method: Method) -> int | None:
    # the most samples that a lossless run decodes together; None for no limit. Triggers do not matter
    config, engine = method.config.replace(trigger_token_ids=(0,)), method.engine(DEFAULTS)
    with session_on(model, None, config, policy=method.policy, engine=engine) as session:
        return most_together(session)


def _read(model: Any, tokenizer: Any, engine: EngineOptions, samples: Any, pending: Any) -> SharedPrompt:
    configs = [policy_class(one.method.policy).adapt(one.method.config) for one in pending]
    return read_prompt(
        model,
        tokenizer,
        [sample.prompt_ids for sample in samples],
        capacity=max(len(sample.prompt_ids) + sample.max_new_tokens for sample in samples),
        window=max(config.window_prefill for config in configs),
        engine=engine,
    )


def _decode(
    model: Any, tokenizer: Any, engine: EngineOptions, shared: SharedPrompt, variant: MethodVariant,
    samples: Sequence[TaskSample],
) -> list[Row]:  # fmt: skip
    # decode samples by one method and score them
    prompts = [sample.prompt_ids for sample in samples]
    result = generate(
        model, tokenizer, prompts, variant.config(len(prompts[0])), policy=variant.method.policy,
        max_new_tokens=[sample.max_new_tokens for sample in samples], shared=shared,
        engine=variant.method.engine(engine),
    )  # fmt: skip
    if result.interrupted:
        raise KeyboardInterrupt
    if result.error is not None:
        raise result.error
    return decoded_rows(variant, samples, result, tokenizer)


def empty_row(variant: MethodVariant, sample: TaskSample) -> dict[str, Any]:
    """Return a row with the columns known before decoding, all others empty; it sets the order."""
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


def decoded_rows(
    variant: MethodVariant, samples: Iterable[TaskSample], result: Result, tokenizer: Any
) -> list[dict[str, Any]]:
    """Return a row for each request of a run; `samples` are in the order of the run's prompts.

    `decode_seconds` is a request's own; `tokens_per_second` is the whole run's, of steady steps.
    """
    rows = []
    for sample, report, text in zip(samples, result.report.requests, result.texts, strict=True):
        scores = dict(find_task(sample.task).score(sample, report.token_ids, text, tokenizer))
        places, right = by_sentence(sample, text, tokenizer)
        rows.append(
            empty_row(variant, sample)
            | {name: getattr(report, name) for name in REPORTED}
            | {
                "score": float(scores.pop("score")),
                "scores": scores,
                "generated": len(report.token_ids),
                "tokens_per_second": result.report.steady_tokens_per_second,
                "sentence_places": places,
                "sentence_scores": right,
                "text": text,
            }
            | ({name: getattr(report.lossless, name) for name in COUNTS} if report.lossless else {})
        )
    return rows


def by_sentence(sample: TaskSample, text: str, tokenizer: Any) -> tuple[list[float] | None, list[float] | None]:
    """Score the sentences of an answer: 1 if the text contains the sentence, ignoring white space.

    A sentence may stand anywhere in the text, so that a lost or added word spoils one sentence only.

    Returns:
        For each sentence the tokens of the right answer before it, and its score; None for both if the right
        answer does not have several sentences.
    """
    if len(sample.sentences) < 2:  # noqa: PLR2004 - several
        return None, None
    said = " ".join(text.split())
    right = [float(" ".join(sentence.split()) in said) for sentence in sample.sentences]
    starts = ["".join(sample.sentences[:count]) for count in range(len(sample.sentences))]
    places = [float(len(tokenizer(start, add_special_tokens=False)["input_ids"])) if start else 0.0 for start in starts]
    return places, right
