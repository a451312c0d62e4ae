"""What a model's positions hold, asked before anything runs."""

from collections.abc import Iterable, Sequence
from typing import Any

from sfi_core.errors import InputError
from sfi_core.measure.evaluation.tasks import Task, TaskSample
from sfi_core.measure.evaluation.text_windows import Window


def positions_of(model: Any) -> int | None:
    """Return how many positions a model has; None where its config does not say."""
    config = model.config.get_text_config(decoder=True)
    found: int | None = getattr(config, "max_position_embeddings", None)
    return found or None


def check_lengths_asked(limit: int | None, lengths: Iterable[int]) -> None:
    """Refuse lengths that are longer than the model's positions (`limit`; None for no limit).

    Raises:
        InputError: With the length and the limit.
    """
    longest = max(lengths)
    if limit is not None and longest > limit:
        raise InputError(f"length must be at most the model's {limit} positions, got {longest}")


def check_task(
    limit: int | None, task: Task, tokenizer: Any, length: int, seeds: Sequence[int]
) -> TaskSample:
    """Refuse a task of a length whose prompt and answer the model's positions cannot hold.

    The first seed stands for all, but for a length so near the limit that a longer answer might not fit.

    Returns:
        The sample of the first seed.

    Raises:
        InputError: With the task, the length, the tokens and the limit.
    """
    first = task.sample(tokenizer, length, seeds[0])
    near = limit is not None and length + 2 * first.max_new_tokens > limit
    others = (task.sample(tokenizer, length, seed) for seed in seeds[1:]) if near else ()
    for sample in (first, *others):
        prompt, new = len(sample.prompt_ids), sample.max_new_tokens
        if limit is not None and prompt + new > limit:
            raise InputError(
                f"task {task.name!r} of length {length} must fit the model's {limit} positions, "
                f"got {prompt} prompt and {new} new tokens"
            )
    return first


def check_window(limit: int | None, window: Window) -> None:
    """Refuse a window of a text that the model's positions cannot hold.

    Raises:
        InputError: With the length, the tokens and the limit.
    """
    prompt, whole = window.prompt_tokens, len(window.ids)
    if limit is not None and whole > limit:
        raise InputError(
            f"fidelity of length {prompt} must fit the model's {limit} positions, "
            f"got {prompt} prompt and {whole - prompt} new tokens"
        )
