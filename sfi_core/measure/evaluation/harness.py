"""lm-evaluation-harness tasks under a policy.

The harness builds the requests and scores the answers; `harness_model` runs the model.
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfi_core.errors import BackendError, ConfigError
from sfi_core.models.load import first_line
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions

FEWSHOT_SEED = 1234  # the harness's own default
REFUSED = {"UNSAFE_CODE": "runs code that the model writes", "MULTIMODAL": "shows pictures"}
RULER = (4096, 8192, 16384, 32768, 65536, 131072)  # lengths that RULER's tasks report
BOOTSTRAPS = 1000  # resamplings for a standard error without a formula


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRow:
    """One metric of one task.

    Attributes:
        task: The task; a member of a group has a row of its own besides the group's.
        metric: The metric, with its filter unless that is "none".
        value: What the harness found.
        stderr: Its standard error; NaN where the harness gives none.
        samples: Documents evaluated.
        decoding: Whether any request took a decoding step. Multiple choice with answers of one token takes
            none: the prefill answers, and it is dense under every policy.
        read_ratio: Share of the cache read over all decoding steps; 1 where there were none.
        selection_ratio: Share of the cache that the selection read, over the same steps; see `RequestReport`.
        stored_ratio: Share of the cache that the method has to keep.
        truncated: Requests whose context the harness cut at the start, to fit the model's positions.
    """

    task: str
    metric: str
    value: float
    stderr: float
    samples: int
    decoding: bool
    read_ratio: float
    selection_ratio: float
    stored_ratio: float
    truncated: int


def check_harness() -> None:
    """Refuse to run without the harness.

    Raises:
        BackendError: The harness is not installed.
    """
    missing = [name for name in ("lm_eval", "accelerate") if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"harness tasks need {missing[0]}, which is not installed; pip install 'sfi-toolkit[eval]'"
        )


def evaluate_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    policy: str = "sfi",
    config: SfiConfig | None = None,
    *,
    limit: int | None = None,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
    batch_size: int = 1,
    backend: str = "auto",
    engine: EngineOptions = DEFAULTS,
    lengths: Sequence[int] = (),
    loaded: Sequence[Any] | None = None,
    on_request: Callable[[int, int], None] | None = None,
) -> list[HarnessRow]:
    """Run tasks of lm-evaluation-harness with the model decoding under a policy.

    Args:
        model: A decoder-only model of transformers.
        tokenizer: Its tokenizer.
        tasks: Names of tasks, groups or tags.
        policy: A name from `sfi_core.policies.POLICIES`.
        config: The settings; None is the `default` preset.
        limit: Documents of each task; None for all.
        include_path: Folder with further task files.
        num_fewshot: Examples before each request; None leaves it to the task.
        chat: Apply the tokenizer's chat template.
        batch_size: Prompts decoded together where a task generates text.
        backend: "auto", "torch" or "triton".
        engine: How steps are run.
        lengths: Tokens of the prompts, for tasks that make prompts of any length (RULER); see `load_tasks`.
        loaded: The tasks as `load_tasks` has given them for these arguments, to be used again; None loads
            them. RULER makes its prompts anew whenever they are loaded, which takes minutes.
        on_request: Called with the requests of a task answered so far and in all.

    Returns:
        A row for each task and metric.

    Raises:
        BackendError: The harness is not installed.
        ConfigError: A task is unknown, its data or a package that it needs cannot be had, it runs the model's
            code or shows pictures, or a setting is out of range.
        SfiError: As `sfi_core.generate`.
    """
    check_harness()
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be positive, got {limit}")
    if num_fewshot is not None and num_fewshot < 0:
        raise ConfigError(f"num_fewshot must be at least 0, got {num_fewshot}")
    if chat and not tokenizer.chat_template:
        raise ConfigError("chat needs a tokenizer with a chat template, got one without")
    # the harness is slow to import, and optional
    from lm_eval import evaluate  # noqa: PLC0415

    from sfi_core.measure.evaluation.harness_model import PolicyLM  # noqa: PLC0415

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # the rows say what the harness warns of
    rows = []
    with redirect_stdout(sys.stderr):  # the harness prints to stdout, where sfi writes data
        if loaded is None:
            loaded = load_tasks(tasks, include_path, tokenizer, lengths)
        for found in loaded:
            _prepare(found["tasks"].values(), num_fewshot)
            lm = PolicyLM(model, tokenizer, policy, config, batch_size, backend, on_request, engine)
            results = evaluate(
                lm,
                found,
                limit=limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=False,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
            facts = {"decoding": lm.decoding, "truncated": lm.truncated, **lm.ratios()}
            rows += _rows(results, facts)
    return rows


def load_tasks(
    tasks: Sequence[str],
    include_path: Path | None = None,
    tokenizer: Any = None,
    lengths: Sequence[int] = (),
) -> list[Any]:
    """Let the harness load tasks with their data.

    Args:
        tasks: Names of tasks, groups or tags.
        include_path: Folder with further task files.
        tokenizer: The model's tokenizer, by whose name RULER's tasks find it again.
        lengths: Tokens of RULER's prompts; those that RULER does not report are left out, and 4,096 are
            taken where none is left.

    Raises:
        ConfigError: A task is unknown, or cannot be loaded here.
    """
    import datasets  # type: ignore[import-untyped]  # noqa: PLC0415 - comes with the harness

    datasets.disable_progress_bars()

    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"include path must be a folder of task files, got {include_path}")
    found = []
    for name in tasks:
        sizes = tuple(length for length in lengths if length in RULER)
        own = (getattr(tokenizer, "name_or_path", ""), sizes or RULER[:1])
        manager = task_manager(include_path, *own, defaults=False)
        if name not in manager.all_subtasks:  # groups may have members of the harness's own
            manager = task_manager(include_path, *own, defaults=True)
        if name not in manager.task_index:
            raise ConfigError(f"unknown lm-eval task {name!r}; `lm-eval ls tasks` lists them")
        try:
            found.append(manager.load(name))
        except (
            OSError,
            ValueError,
            ImportError,
            KeyError,
            TypeError,
            AssertionError,
            datasets.exceptions.DatasetsError,
        ) as error:
            raise ConfigError(
                f"lm-eval task {name!r} cannot be loaded: {first_line(error)}"
            ) from error
    return found


@cache
def task_manager(
    include_path: Path | None,
    tokenizer: str = "",
    lengths: tuple[int, ...] = RULER[:1],
    *,
    defaults: bool,
) -> Any:
    """Index a folder's task files; with `defaults` also the harness's thousands, which takes seconds."""
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    folder = None if include_path is None else str(include_path)
    facts: dict[str, Any] = {"tokenizer": tokenizer, "max_seq_lengths": list(lengths)}
    return TaskManager(include_path=folder, include_defaults=defaults, metadata=facts)


def _prepare(tasks: Any, num_fewshot: int | None) -> None:
    # as lm_eval.simple_evaluate does, which would also look the model up on the hub
    for task in tasks:
        for flag, what in REFUSED.items():
            if getattr(task, flag, False):
                raise ConfigError(f"lm-eval task {task.task_name!r} {what}, which sfi does not do")
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)


def _rows(results: Any, facts: dict[str, Any]) -> list[HarnessRow]:
    rows = []
    counts = {name: n["effective"] for name, n in results["n-samples"].items()}
    for task, metrics in results["results"].items():
        members = results.get("group_subtasks", {}).get(task) or [task]
        for key, value in metrics.items():
            metric, _, kept = key.partition(",")
            if not isinstance(value, int | float) or not kept or metric.endswith("_stderr"):
                continue
            if metric in map(str, RULER) and value == -1:
                continue  # a length without prompts
            stderr = metrics.get(f"{metric}_stderr,{kept}")
            rows.append(
                HarnessRow(
                    task=task,
                    metric=metric if kept == "none" else f"{metric},{kept}",
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else math.nan,
                    samples=counts.get(task) or sum(counts.get(member, 0) for member in members),
                    **facts,
                )
            )
    return rows
