"""Predicts from a recorded run, without the model, what another setting would have kept (docs/tune.md).

supports = Supports.load(trace)
outcome = replay(supports, Setting.recorded(trace))
"""

from sfi_traces.model.supports import Supports
from sfi_traces.replay.measured import Comparison, compare
from sfi_traces.replay.outcome import Outcome, StepMetrics, pareto
from sfi_traces.replay.replay import replay, replay_request, schedule
from sfi_traces.replay.reuse import Reuse, chance, reuse
from sfi_traces.replay.setting import RULES, RecordedVocabulary, Setting, check_effect, grid

__all__ = [
    "RULES", "Comparison", "Outcome", "RecordedVocabulary", "Reuse", "Setting", "StepMetrics", "Supports", "chance",
    "check_effect", "compare", "grid", "pareto", "replay", "replay_request", "reuse", "schedule",
]  # fmt: skip
