"""What the device keeps of every request, so that it plans a step without the host: a row of int32 words.

The numbers are those of the host's state of a request, whose rules `advance` repeats.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

STATE_WORDS = 9
(
    STEP,  # the step under way
    LENGTH,  # cached tokens
    RECENT_START,  # first token of the recent segment
    PACKED,  # tokens of the packed segment, before what a slow step under way selects
    SINK,  # sink tokens
    SINCE_SLOW,  # fast steps since the last slow one
    REASON,  # why the step is slow; FAST_STEP if it is not
    TRIGGERS,  # a bit for each of the last 31 generated tokens, the latest lowest: whether it is in T_trig
    FINISHED,  # 1 once a stop token came
) = range(STATE_WORDS)
FAST_STEP, SLOW_START, TRIGGERED, DUE, WITH_BATCH = range(5)  # of REASON
MOST_DELAY = 30  # of a trigger: what TRIGGERS has room for
MOST = 2**31 - 1  # of a rule; as `t_max`, never
KEPT_TRIGGERS = 2**MOST_DELAY - 1  # the bits that stay in TRIGGERS when the next one comes
SLOWS, FASTS = range(2)  # of the summary
IN_TRIGGERS, IN_STOPS = range(2)  # of the bitmaps
BITS = 32  # tokens of a bitmap's word


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """When a step is slow, and what it leaves; none above `MOST`.

    Attributes:
        slow_start: Steps from step 0 on that are slow.
        min_gap: Steps from a slow step before which a trigger does not count.
        t_max: Fast steps after which one is due to be slow.
        delay: Steps by which a trigger is late, up to `MOST_DELAY`.
        budget: Most tokens that a slow step selects; 0 where slow steps keep the packed segment as it is.
        recent: Tokens of the recent segment at a slow step.
        sliding: Whether the segment keeps that many, instead of growing from where a slow step put it.
        synchronized: Whether one slow request makes all of them slow.
    """

    slow_start: int
    min_gap: int
    t_max: int
    delay: int
    budget: int
    recent: int
    sliding: bool
    synchronized: bool


def bitmaps(
    trigger_ids: Collection[int], stop_ids: Collection[int], device: torch.device
) -> torch.Tensor:
    """Return two sets of token ids as a bit for each token up to the largest, [2, words] int32."""
    size = max([0, *trigger_ids, *stop_ids]) // BITS + 1
    bit_2XI = torch.zeros(2, size, BITS, dtype=torch.int64)
    for row, ids in zip(bit_2XI.flatten(1), (trigger_ids, stop_ids), strict=True):
        row[[token for token in ids if token >= 0]] = 1  # no token has a negative id
    return (bit_2XI << torch.arange(BITS)).sum(2).int().to(device)  # the last bit is the sign
