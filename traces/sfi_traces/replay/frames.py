"""What a player shows of a step, as plain data."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """The context in bins, oldest first.

    Attributes:
        mass: Share of the step's dense attention in each bin.
        added: Bins above an even share that were not at the audited step before.
        removed: Bins that were above an even share then, and are not now.
        selected: Bins with positions of the selections in force, if the trace has them.
    """

    mass: Numbers
    added: Marks
    removed: Marks
    sink: Marks
    recent: Marks
    selected: Marks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One step.

    Attributes:
        before: Text before the current sentence, from the end of the prompt on.
        sentence: The current sentence before this step's token.
        reason: Why the step was slow; empty for a fast one.
        steps_since_slow: Fast steps since the last slow step.
        attended_tokens: Tokens read per KV head.
        audited: Whether the step has a strip.
        measures: Retained mass and overlaps by column name; None where not recorded.
        lambda_star: Mean lambda* of a refresh; None without a Selector.
    """

    step: int
    before: str
    sentence: str
    token: str
    slow: bool
    reason: str
    steps_since_slow: int
    sentence_index: int
    attended_tokens: float
    context_tokens: int
    audited: bool
    measures: dict[str, float | None]
    lambda_star: float | None
