"""Run lm-evaluation-harness tasks under methods, a row for each method, size, task and metric."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.evaluation.claims import ALONE, Claims, taken
from sfi_core.measure.evaluation.grid import FAILURES, Key
from sfi_core.measure.evaluation.harness import check_harness, evaluate_harness, load_tasks
from sfi_core.measure.evaluation.method import Method, MethodVariant, Size, check_distinct
from sfi_core.measure.evaluation.positions import check_harness_tasks, positions_of
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
        lengths: Tokens of the prompts, for tasks that make prompts of any length (RULER).
        table: The table of the rows.
    """

    methods: tuple[Method, ...]
    sizes: tuple[Size, ...]
    tasks: tuple[str, ...]
    include_path: Path | None
    limit: int | None
    lengths: tuple[int, ...] = ()
    table: ClassVar[str] = "harness"

    def __post_init__(self) -> None:
        """Reject what cannot run.

        Raises:
            ConfigError: A limit that is not positive, two methods, sizes or tasks of one name, or a lossless
                method, which gives what full attention gives.
            BackendError: The harness is not installed.
        """
        check_distinct({"method": [one.key for one in self.variants], "task": self.tasks})
        lossless = [method.label for method in self.methods if method.lossless]
        if lossless:
            raise ConfigError(
                f"harness must come without lossless methods, whose score is full-kv's, got {lossless[0]}"
            )
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
        """Refuse, before anything runs, tasks that the harness does not have or the model cannot hold.

        Raises:
            ConfigError: The harness does not have a task.
            InputError: A task's answers leave no position for a prompt.
        """
        loaded = self._load(self.tasks, tokenizer)
        check_harness_tasks(positions_of(model), loaded)

    def run(
        self,
        model: Any,
        tokenizer: Any,
        done: Container[Key] = frozenset(),
        *,
        claims: Claims = ALONE,
        batch_size: int = 1,
        backend: str = "auto",
        prefill_chunk: int = 0,
        engine: EngineOptions = DEFAULTS,
    ) -> Iterator[dict[str, Any]]:
        """Run the tasks; the arguments are those of `TaskGrid.run`, of which `prefill_chunk` is not used.

        Yields:
            A plain row for each method, size and task, with its `metrics`, or with an `error`.
        """
        keys = self.keys
        loaded: dict[str, list[Any]] = {}
        for unit, (task, one) in enumerate(product(self.tasks, self.variants)):
            with taken(claims, [unit], lambda number: keys[number] not in done) as mine:
                for _ in mine:
                    if task not in loaded:  # one task's data at a time
                        loaded = {task: self._load([task], tokenizer)}
                    own = {
                        "backend": backend, "engine": engine_for(one.method.policy, engine),
                        "loaded": loaded[task],
                    }  # fmt: skip
                    yield self._row(model, tokenizer, task, one, batch_size, own)

    def _load(self, tasks: Sequence[str], tokenizer: Any) -> list[Any]:
        return load_tasks(tasks, self.include_path, tokenizer, self.lengths)

    def _row(
        self,
        model: Any,
        tokenizer: Any,
        task: str,
        variant: MethodVariant,
        batch_size: int,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        # with batches, and one by one where a batch fails
        row = {**variant.columns(0), "asked": task, "metrics": [], "error": None}
        for size in sorted({batch_size, 1}, reverse=True):
            try:
                found = evaluate_harness(
                    model,
                    tokenizer,
                    [task],
                    variant.method.policy,
                    variant.config(0),
                    limit=self.limit,
                    include_path=self.include_path,
                    chat=bool(getattr(tokenizer, "chat_template", None)),
                    batch_size=size,
                    **options,
                )
            except FAILURES as error:
                row["error"] = first_line(error)
                continue
            return row | {"metrics": [_plain(asdict(metric)) for metric in found], "error": None}
        return row


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN; NaN is the one value that differs from itself
    return {name: None if value != value else value for name, value in values.items()}  # noqa: PLR0124
