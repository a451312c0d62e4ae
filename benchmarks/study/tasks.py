"""Part `tasks`: exact answers under each method, where full attention gives them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.study.own_tasks import OWN
from benchmarks.study.part import Part, Row
from benchmarks.study.reader_tasks import READER
from benchmarks.study.records import Key, short
from sfi_core.measure.evaluation.samples import SampleRows, sample_cells
from sfi_core.measure.evaluation.tasks import TASKS

DEFAULT = ("niah-single", "facts", "places")
HELD_SEED = 1000  # seeds of `held` start here, those of `dev` at 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a task.

    Attributes:
        number: From 0.
        task: A name from `TASKS`, `OWN` or `READER`.
        half: "dev" or "held"; samples of the two have different seeds.
        length: The most tokens of its prompt.
    """

    number: int
    task: str
    half: str
    length: int


class TasksPart(Part):
    """The rows of a sample, one a method and share."""

    name = "tasks"
    columns = ("model", "task", "half", "length", "number", "method", "share")
    table = "tasks"

    def items(self) -> list[Sample]:
        """Return the samples asked for, number by number."""
        return [
            Sample(number, task, half, length)
            for number in self.options.windows
            for length in self.options.lengths
            for half in self.options.halves
            for task in self.options.tasks
        ]

    def rows(self, item: Sample) -> list[Row]:
        """See `Part`."""
        where = {"model": self.model_name, **asdict(item)}
        return [{**where, "method": listed.text, "share": listed.share} for listed in self.methods]

    def make(self, item: Sample, pending: set[Key]) -> Iterator[Row]:
        """Decode a sample under every pending method, its prompt read once."""
        TASKS.update(OWN | READER)  # a task is looked up by its name
        row_of = dict(zip((listed.method.key for listed in self.methods), self.rows(item), strict=True))
        seed = item.number + (HELD_SEED if item.half == "held" else 0)
        cells = sample_cells([listed.method for listed in self.methods], [item.task], [item.length], [seed])
        missing = [cell for cell in cells if self.key(row_of[cell.method.key]) in pending]
        for row in SampleRows(self.model, self.tokenizer).make(missing):
            yield row_of[row["method"], row["size"]] | _measured(row)


def _measured(row: Row) -> dict[str, Any]:
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
