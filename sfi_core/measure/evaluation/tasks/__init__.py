"""Built-in tasks: generated prompts of any length with answers that can be checked exactly."""

from sfi_core.errors import unknown
from sfi_core.measure.evaluation.tasks.base import DocumentTask, TaskSample
from sfi_core.measure.evaluation.tasks.documents import (
    BundledRecall,
    CommonWords,
    Needles,
    SentenceRecall,
    VariableTracking,
)

TASKS: dict[str, DocumentTask] = {
    "niah-single": Needles("niah-single"),
    "niah-multi-key": Needles("niah-multi-key", decoys=True),
    "niah-multi-value": Needles("niah-multi-value", values=4),
    "niah-multi-query": Needles("niah-multi-query", keys=4),
    "variable-tracking": VariableTracking(),
    "common-words": CommonWords(),
    "sentence-recall": SentenceRecall(),
    "bundled-recall": BundledRecall(),
    "bundled-recall-1": BundledRecall("bundled-recall-1", asked=1),
    "bundled-recall-30": BundledRecall("bundled-recall-30", asked=30),
}


def find_task(name: str) -> DocumentTask:
    """Look a task up; raise `ConfigError` for another name."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


__all__ = ["TASKS", "TaskSample", "find_task"]
