"""What a player shows of a step, as plain data."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """The context as a row of bins, oldest first.

    Attributes:
        mass: Share of the recorded attention in each bin, of a step's whole attention.
        added: Bins that hold more than an even share now, and did not at the audited step before.
        removed: The other way round.
        sink: Bins with sink tokens.
        recent: Bins with recent tokens.
        selected: Bins with tokens that the last refresh selected, where the trace has their positions.
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
        step: Decoding step t.
        before: Text before the current sentence, from the end of the prompt on.
        sentence: The current sentence before this step's token.
        token: The token that the step generated.
        slow: Whether the step was slow.
        reason: Why; empty for a fast one.
        steps_since_slow: Fast steps since the last slow step.
        sentence_index: Number of the sentence.
        attended_tokens: Tokens read per KV head.
        context_tokens: Cached tokens.
        audited: Whether the strip is known; without, it is empty.
        measures: Retained mass and overlaps, by the names of their columns; None where not recorded.
        lambda_star: Mean of lambda* at a refresh; None without a Selector.
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
