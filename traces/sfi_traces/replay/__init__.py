"""Predicts from a recorded run, without the model, what another setting would have kept (docs/tune.md).

supports = Supports.load(trace)
outcome = replay(supports, Setting.recorded(trace))
"""

from sfi_traces.model.supports import Supports
from sfi_traces.replay.measured import Comparison, compare
from sfi_traces.replay.outcome import Outcome, StepMetrics, pareto
from sfi_traces.replay.replay import largest_budget, replay, replay_request, replayable, schedule
from sfi_traces.replay.reuse import chance, reuse
from sfi_traces.replay.setting import RULES, SCAN, RecordedVocabulary, Setting, check_effect, grid

__all__ = [
    "RULES", "SCAN", "Comparison", "Outcome", "RecordedVocabulary", "Setting", "StepMetrics", "Supports",
    "chance", "check_effect", "compare", "grid", "largest_budget", "pareto", "replay", "replay_request", "replayable",
    "reuse", "schedule",
]  # fmt: skip
