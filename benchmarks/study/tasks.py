"""Part `tasks`: exact answers under each method, where full attention gives them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.listed import Listed
from benchmarks.study.own_tasks import OWN
from benchmarks.study.records import Key, short
from sfi_core.measure.evaluation.method import Method, Size
from sfi_core.measure.evaluation.runner import TaskGrid
from sfi_core.measure.evaluation.tasks import TASKS

DEFAULT = ("niah-single", "facts", "places")
HELD_SEED = 1000  # seeds of `held` start here, those of `dev` at 0


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    """A sample of a task.

    Attributes:
        number: From 0.
        task: A name from `TASKS` or `OWN`.
        half: "dev" or "held"; samples of the two have different seeds.
        length: The most tokens of its prompt.
    """

    number: int
    task: str
    half: str
    length: int

    def __str__(self) -> str:
        """Name the sample in a progress line."""
        return f"{self.task} {self.half} {self.length} no. {self.number}"

    @property
    def seed(self) -> int:
        """What the sample is drawn from."""
        return self.number + (HELD_SEED if self.half == "held" else 0)


@dataclass(frozen=True, slots=True)
class TasksPart:
    """The rows of a sample, one a method and share.

    Attributes:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer.
        name: What rows call the model.
        methods: Methods at their shares.
    """

    model: Any
    tokenizer: Any
    name: str
    methods: Sequence[Listed]

    def keys(self, sample: Sample) -> list[Key]:
        """Return the keys of a sample's rows."""
        where = self._where(sample)
        return [key({**where, "method": one.text, "share": one.share}) for one in self.methods]

    def make(self, sample: Sample, pending: set[Key]) -> Iterator[dict[str, Any]]:
        """Decode a sample under every pending method, its prompt read once (`TaskGrid.run`)."""
        TASKS.update(OWN)  # the runner finds a task by its name
        where = self._where(sample)
        text_of = {one.variant.key: one for one in self.methods}
        methods, sizes = _grid(self.methods)
        grid = TaskGrid(
            methods=methods, sizes=sizes, tasks=(sample.task,), lengths=(sample.length,),
            seeds=(sample.seed,),
        )  # fmt: skip
        done = {
            grid_key
            for grid_key in grid.keys
            if key({**where, **_which(text_of[grid_key[:2]])}) not in pending
        }
        for row in grid.run(self.model, self.tokenizer, done):
            one = text_of[row["method"], row["size"]]
            yield {**where, **_which(one), **_measured(row)}

    def _where(self, sample: Sample) -> dict[str, Any]:
        return {
            "model": self.name,
            "number": sample.number,
            "task": sample.task,
            "half": sample.half,
            "length": sample.length,
        }


def key(row: Mapping[str, Any]) -> Key:
    """Return what tells a row from others."""
    names = ("model", "task", "half", "length", "number", "method", "share")
    return tuple(row[name] for name in names)


def _grid(listed: Sequence[Listed]) -> tuple[tuple[Method, ...], tuple[Size, ...]]:
    # the methods and sizes that all pairs of a table are made of
    methods = {one.variant.method.label: one.variant.method for one in listed}
    sizes = {one.variant.size.label: one.variant.size for one in listed if one.variant.size}
    return tuple(methods.values()), tuple(sizes.values())


def _which(one: Listed) -> dict[str, Any]:
    return {"method": one.text, "share": one.share}


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["error"] is not None:
        return {"error": row["error"]}
    return {
        "score": short(row["score"], 4),
        "read": short(row["read_ratio"]),
        "selecting": short(row["selection_ratio"]),
        "generated": row["generated"],
        "slow_steps": row["slow_steps"],
        "text": row["text"][:80],
        "expected": row["expected"],
    }
