"""Run lm-evaluation-harness tasks under methods, a row for each method, size, task and metric."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.harness import check_harness, evaluate_harness, load_tasks
from sfi_core.measure.evaluation.method import Method, MethodVariant, Size, check_distinct
from sfi_core.measure.evaluation.runner import FAILURES, Key
from sfi_core.models.load import first_line
from sfi_core.settings.engine import DEFAULTS, EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessGrid:
    """The rows of a run: every method at every size on every task.

    Attributes:
        methods: The methods that decode.
        sizes: Budgets, not shares, since the prompts' lengths differ; without any, each method keeps its own.
        tasks: The harness's names of tasks, groups or tags.
        include_path: Folder with further task files; None for none.
        limit: Documents of each task; None for all.
        table: The table of the rows.
    """

    methods: tuple[Method, ...]
    sizes: tuple[Size, ...]
    tasks: tuple[str, ...]
    include_path: Path | None
    limit: int | None
    table: ClassVar[str] = "harness"

    def __post_init__(self) -> None:
        """Reject what cannot run.

        Raises:
            ConfigError: A limit that is not positive, or two methods, sizes or tasks of one name.
            BackendError: The harness is not installed.
        """
        check_distinct({"method": [one.key for one in self.variants], "task": self.tasks})
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be positive, got {self.limit}")
        check_harness()

    @property
    def variants(self) -> list[MethodVariant]:
        """The methods at their sizes, each of which answers every task."""
        if not self.sizes:
            return [MethodVariant(method, None) for method in self.methods]
        return [one for method in self.methods for one in method.variants(self.sizes)]

    @property
    def keys(self) -> list[Key]:
        """The keys of all rows, in the order in which they come."""
        return [(*one.key, task) for task in self.tasks for one in self.variants]

    def key(self, row: Mapping[str, Any]) -> Key:
        """Return a row's key."""
        return row["method"], row["size"], row["asked"]

    def weight(self, key: Key) -> int:
        """Return 1 for every row: nothing is known of the time that a task takes."""
        return 1

    def check(self, model: Any, tokenizer: Any) -> None:
        """Refuse, before anything runs, tasks that the harness does not have.

        Raises:
            ConfigError: The harness does not have a task.
        """
        load_tasks(self.tasks, self.include_path)

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
        """Run the tasks; the arguments are those of `TaskGrid.run`, of which `prefill_chunk` is not used.

        Yields:
            A plain row for each method, size and task, with its `metrics`, or with an `error`.
        """
        for task in self.tasks:
            for one in self.variants:
                if (*one.key, task) in done:
                    continue
                row = {**one.columns(0), "asked": task, "metrics": [], "error": None}
                try:
                    found = evaluate_harness(
                        model,
                        tokenizer,
                        [task],
                        one.method.policy,
                        one.config(0),
                        limit=self.limit,
                        include_path=self.include_path,
                        chat=bool(getattr(tokenizer, "chat_template", None)),
                        backend=backend,
                        engine=engine_for(one.method.policy, engine),
                    )
                except FAILURES as error:
                    yield row | {"error": first_line(error)}
                    continue
                yield row | {"metrics": [_plain(asdict(metric)) for metric in found]}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN; NaN is the one value that differs from itself
    return {name: None if value != value else value for name, value in values.items()}  # noqa: PLR0124
