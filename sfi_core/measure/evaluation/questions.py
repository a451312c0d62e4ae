"""Tasks: prompts of a given length with answers that can be checked exactly."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sfi_core.errors import InputError
from sfi_core.generation.prompts import chat_text, text_ids

PROBE = 32  # units of the first guess, which shows how many tokens a unit has


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """One prompt of a task."""

    task: str
    length: int  # prompt tokens asked for, an upper bound of `prompt_ids`
    seed: int
    prompt: str  # the text, including the chat template
    prompt_ids: tuple[int, ...]
    answers: tuple[str, ...]  # the strings that the task's score looks for
    max_new_tokens: int  # tokens that a full answer needs, with room to spare


@dataclass(frozen=True, slots=True)
class Question:
    """A document with a question: the user's turn, the first words of the answer, and as in `TaskSample`."""

    text: str
    lead: str
    answers: tuple[str, ...]


def seeded(name: str, length: int, seed: int) -> random.Random:
    """Return the random generator of a sample."""
    return random.Random(f"{name} {length} {seed}")  # noqa: S311 - a sample is no secret


def depths(seed: int, count: int) -> list[float]:
    """Return relative depths in [0, 1), evenly apart and shifted with the seed."""
    first = seed * 0.6180339887498949 % 1  # the golden ratio: consecutive seeds cover [0, 1) evenly
    return [(first + index / count) % 1 for index in range(count)]


def write_prompt(tokenizer: Any, question: Question) -> tuple[str, tuple[int, ...]]:
    """Return a question as text and as tokens, in the tokenizer's chat template if it has one."""
    if getattr(tokenizer, "chat_template", None):
        text = chat_text(tokenizer, [{"role": "user", "content": question.text}]) + question.lead
        return text, tuple(text_ids(tokenizer, text, special=False))
    text = f"{question.text}\n{question.lead}"
    return text, tuple(text_ids(tokenizer, text))


def fit(name: str, tokens: Callable[[int], int], length: int, least: int = 0) -> int:
    """Return the most units, at least `least`, whose prompt has at most `length` tokens, by guesses that interpolate.

    Raise `InputError` if even `least` units are too long, or more units do not give more tokens.
    """
    low, low_tokens = least, tokens(least)
    if low_tokens > length:
        raise InputError(f"length must be at least {low_tokens} for task {name!r}, got {length}")
    high, high_tokens = least + PROBE, tokens(least + PROBE)
    if high_tokens <= low_tokens:
        raise InputError(f"tokenizer must have tokens for the words of task {name!r}, got none")
    shortest = low_tokens
    while high_tokens <= length:
        low, low_tokens = high, high_tokens
        per_unit = (high_tokens - shortest) / (high - least)
        high += 1 + int(1.02 * (length - high_tokens) / per_unit)
        high_tokens = tokens(high)
    while high - low > 1:
        share = (length - low_tokens) / (high_tokens - low_tokens)
        guess = min(high - 1, max(low + 1, low + int(share * (high - low))))
        guess_tokens = tokens(guess)
        if guess_tokens <= length:
            low, low_tokens = guess, guess_tokens
        else:
            high, high_tokens = guess, guess_tokens
    return low


@dataclass(frozen=True, slots=True)
class DocumentTask:
    """A task of `sfi eval`: a question over a document of as many units as a prompt's length allows."""

    name: str  # the name on the command line
    bundled: bool = False  # whether the task is made for the bundled checkpoint only
    least: int = 0  # the fewest units of a document that contains the answers

    def question(self, length: int, seed: int, units: int) -> Question:
        """Draw the question over a document of `units` units; the same one for the same arguments."""
        raise NotImplementedError

    def sample(self, tokenizer: Any, length: int, seed: int) -> TaskSample:
        """Draw a prompt of at most `length` tokens, the same for the same arguments; `InputError` if none fits."""
        self.need(tokenizer)

        def tokens(units: int) -> int:
            return len(write_prompt(tokenizer, self.question(length, seed, units))[1])

        chosen = self.question(length, seed, fit(self.name, tokens, length, self.least))
        text, ids = write_prompt(tokenizer, chosen)
        expected = tokenizer(", ".join(chosen.answers), add_special_tokens=False)["input_ids"]
        return TaskSample(
            task=self.name,
            length=length,
            seed=seed,
            prompt=text,
            prompt_ids=ids,
            answers=chosen.answers,
            max_new_tokens=2 * len(expected) + 16,  # room for words between the answers
        )

    def need(self, tokenizer: Any) -> None:
        """Raise `InputError` without a tokenizer."""
        if tokenizer is None:
            raise InputError(f"task {self.name!r} must have a tokenizer, got none")

    def score(self, sample: TaskSample, token_ids: Sequence[int], text: str, tokenizer: Any) -> dict[str, float]:
        """Judge a completion; "score" is the share of the answers in it, ignoring case (RULER's string_match_all)."""
        said = text.lower()
        right = sum(answer.lower() in said for answer in sample.answers)
        return {"score": right / len(sample.answers)}
