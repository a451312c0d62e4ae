"""What a recorded run would have retained under another setting.

At a fast step the attended set is the sink, the recent segment and the selection of the last slow step s. In
place of the Selector's choice it is the `budget` most probable positions of J(s) in the recorded dense
attention. The set's recorded probability at the step is a lower bound of its retained mass, since unrecorded
positions have some too; the upper bound adds all that they can have. Under codescan s is the step itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sfi_core.errors import TraceError
from sfi_core.policies.built_in.codescan import choosing_tokens
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.step import ByteModel
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.model.steps import Bools, Floats, Ints, Memory, Positions
from sfi_traces.model.supports import Supports
from sfi_traces.replay.outcome import Outcome, StepMetrics
from sfi_traces.replay.setting import Setting

Kept = tuple[Floats, Floats, Floats]  # [N, U] each: retained mass, at least and at most, and overlap


def replay(recorded: Sequence[Supports], setting: Setting) -> Outcome:
    """Replay a setting over several requests, and sum up their steps; see `replay_request`.

    Overlaps of supports of different sizes are no one measure: they are unknown unless `top` is the same in all.
    """
    requests = [replay_request(supports, setting) for supports in recorded]
    alike = len({supports.top for supports in recorded}) == 1
    return Outcome.of(requests if alike else [request.without_overlap() for request in requests])


def replay_request(supports: Supports, setting: Setting) -> StepMetrics:
    """Replay a setting over one request, step by step.

    Raises `TraceError` for a budget beyond what the audit recorded, or an imported trace, whose model's bytes are
    unknown.
    """
    if supports.model["weight_bytes"] is None:
        raise TraceError(
            "trace must be recorded by sfi, got an imported one, of which the byte model is not known; "
            "sfi trace replay DIR --refresh-every 1,2,4 replays how often to select"
        )
    check_budget([supports], setting.config.budget)
    return metrics(supports, setting, schedule(supports, setting))


def metrics(
    supports: Supports,
    setting: Setting,
    reasons: list[str],
    masses: Kept | None = None,
    attended_N: npt.NDArray[Any] | None = None,
) -> StepMetrics:
    """Add up tokens and bytes of steps that are slow for `reasons`.

    `masses` and `attended_N`, the tokens read, are those of a run; None predicts them. What codescan reads to choose is
    added, in tokens' worth.
    """
    model = ByteModel.of(supports.model, dense_layers=setting.config.dense_layers)
    slow_N = np.array([bool(reason) for reason in reasons])
    memory = Memory.of(setting.config.to_dict(), slow_N, supports.length_N, scans=setting.scans)
    if masses is None:
        masses = (_kept_by_scan if setting.scans else _kept)(supports, setting.config, memory)
    if attended_N is None:
        attended_N = np.asarray(model.mean_attended(supports.length_N, memory.read_N))
    chosen_N = _to_choose(supports, setting, memory)
    return StepMetrics(
        supports=supports,
        reasons=reasons,
        attended_N=attended_N + np.asarray(model.mean_attended(0, chosen_N)),
        **dict(zip(("lower_NU", "upper_NU", "overlap_NU"), masses, strict=True)),
        bytes_N=memory.bytes_read(model) + model.row_bytes * chosen_N,
        dense_bytes_N=np.asarray(model.dense(supports.length_N)),
    )


def _to_choose(supports: Supports, setting: Setting, memory: Memory) -> npt.NDArray[Any]:
    # what codescan reads to choose: nothing where it attends to all candidates
    width = max(layer["key_width"] or 0 for layer in supports.model["layers"])
    chooses_N = ~memory.slow_N & (memory.start_N - memory.sink > setting.config.budget) & setting.scans
    pseudo = bool(setting.config.codescan.rest)
    tokens_N = [choosing_tokens(length, width) + pseudo for length in supports.length_N.tolist()]
    return np.where(chooses_N, tokens_N, 0.0)


def schedule(supports: Supports, setting: Setting) -> list[str]:
    """Say why each step would be slow, empty for a fast one, if the tokens stayed as recorded."""
    if setting.scans:
        return ["first"] + [""] * (supports.steps - 1)
    trigger = Trigger(setting.trigger_token_ids, setting.config)
    state = RequestState(prompt_tokens=supports.prompt_tokens)
    state.begin(slow=True, reason="first", new_tokens=supports.prompt_tokens)
    reasons = ["first"]
    for token in supports.tokens[:-1]:
        state.finish_step(token)
        reason = trigger.reason(state)
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        reasons.append(reason)
    return reasons


def largest_budget(recorded: Sequence[Supports]) -> int | None:
    """Return the largest budget that supports can replay; None where they hold every position."""
    return min((supports.top for supports in recorded if supports.length_N[-1] > supports.top), default=None)


def check_budget(recorded: Sequence[Supports], budget: int) -> None:
    """Raise `TraceError` for a budget of more positions than were recorded."""
    most = largest_budget(recorded)
    if most is not None and budget > most:
        raise TraceError(
            f"budget must be at most the audit's {most} positions, got {budget}; "
            f"record with --set audit.top={budget}, or give --budget"
        )


def replayable(setting: Setting, recorded: Sequence[Supports]) -> Setting:
    """Cut a trace's own budget to what its audit recorded, since more cannot be replayed."""
    budget, most = setting.config.budget, largest_budget(recorded)
    if most is None or budget <= most:
        return setting
    return replace(setting, config=setting.config.replace(budget=most))


def _kept(supports: Supports, config: SfiConfig, memory: Memory) -> Kept:
    # for each slow step: a table of its attended positions, in which all fast steps are looked up at once
    N, U, _ = supports.position_NUK.shape
    lower_NU, upper_NU = np.ones((N, U), np.float32), np.ones((N, U), np.float32)
    overlap_NU = np.full((N, U), np.nan, np.float32)
    for slow, end in pairwise([*np.flatnonzero(memory.slow_N).tolist(), N]):
        if slow + 1 == end:
            continue
        fast = slice(slow + 1, end)
        position_NUK, mass_NUK = supports.position_NUK[fast], supports.mass_NUK[fast]
        hit_NUK = _look_up(_attended(supports, slow, config, memory), position_NUK)
        hit_NUK |= position_NUK >= memory.start_N[fast, None, None]
        lower_NU[fast] = np.einsum("nuk,nuk->nu", hit_NUK, mass_NUK)
        unseen_NU = memory.read_N[fast, None] - hit_NUK.sum(-1)
        upper_NU[fast] = lower_NU[fast] + _unrecorded(mass_NUK, unseen_NU)
        overlap_NU[fast] = overlap_after(supports, slow, position_NUK)
    return np.minimum(lower_NU, 1), np.minimum(upper_NU, 1), overlap_NU


def _kept_by_scan(supports: Supports, config: SfiConfig, memory: Memory) -> Kept:
    # the same where each step reads the best of its own support; it reuses nothing, so there is no overlap
    N, U, K = supports.position_NUK.shape
    lower_NU, upper_NU = np.ones((N, U), np.float32), np.ones((N, U), np.float32)
    for step in np.flatnonzero(~memory.slow_N):
        position_UK, mass_UK = supports.position_NUK[step], supports.mass_NUK[step]
        candidate_UK = (position_UK >= memory.sink) & (position_UK < memory.start_N[step])
        score_UK = np.where(candidate_UK, mass_UK, 0)
        read_UK = ((position_UK >= 0) & ~candidate_UK) | top(score_UK, min(config.budget, K))
        lower_NU[step] = (mass_UK * read_UK).sum(-1)
        unseen_U = memory.read_N[step] - read_UK.sum(-1)
        upper_NU[step] = lower_NU[step] + _unrecorded(mass_UK, unseen_U)
    return np.minimum(lower_NU, 1), np.minimum(upper_NU, 1), np.full((N, U), np.nan, np.float32)


def _attended(supports: Supports, slow: int, config: SfiConfig, memory: Memory) -> Bools:
    """Return sink and selected positions after a slow step, [U, T + 1]; the last column stays False."""
    position_UK, mass_UK = supports.position_NUK[slow], supports.mass_NUK[slow]
    sink, start = memory.sink, int(memory.start_N[slow])
    table_UT = np.zeros((len(position_UK), int(supports.length_N[-1]) + 1), np.bool_)
    table_UT[:, :sink] = True
    if start - sink <= config.budget:
        table_UT[:, sink:start] = True
        return table_UT
    unit, rank = np.nonzero((position_UK >= sink) & (position_UK < start))
    score_UT = np.zeros((len(position_UK), start - sink), np.float32)
    score_UT[unit, position_UK[unit, rank] - sink] = mass_UK[unit, rank]
    score_UT = spread(score_UT, config.span)
    if config.page_size > 1:
        score_UT = by_page(score_UT, sink, config.page_size)
    table_UT[:, sink:start] = top(score_UT, config.budget)
    return table_UT


def top(score_UT: Floats, budget: int) -> Bools:
    """Mark the `budget` highest positive scores of each row; the lower index wins ties."""
    if budget >= score_UT.shape[1]:
        return score_UT > 0
    last_U1 = np.partition(score_UT, -budget, axis=1)[:, -budget, None]
    above, equal = score_UT > last_U1, score_UT == last_U1
    room_U1 = budget - above.sum(1, keepdims=True)
    return np.asarray((above | (equal & (equal.cumsum(1) <= room_U1))) & (score_UT > 0))


def spread(score_UT: Floats, span: int) -> Floats:
    """Give each position the best score within `span` positions on each side; windows double."""
    out = np.pad(score_UT, ((0, 0), (span, span)))
    width, wanted = 1, 2 * span + 1
    while width < wanted:
        shift = min(width, wanted - width)
        out = np.maximum(out[:, :-shift], out[:, shift:])
        width += shift
    return out


def by_page(score_UT: Floats, first: int, page_size: int) -> Floats:
    """Give each position the mean score of its page; column 0 is position `first`, page 0 begins at 0."""
    before, T = first % page_size, score_UT.shape[1]
    ends = (before, -(before + T) % page_size)
    sum_UP = np.pad(score_UT, ((0, 0), ends)).reshape(len(score_UT), -1, page_size).sum(-1)
    count_P = np.pad(np.ones(T, np.float32), ends).reshape(-1, page_size).sum(-1)
    return np.asarray(np.repeat(sum_UP / count_P, page_size, axis=1)[:, before : before + T])


def _look_up(table_UT: Bools, position_NUK: Positions) -> Bools:
    # a padded -1 reads the last column of the row above, which is False
    U, width = table_UT.shape
    row_U1 = (np.arange(U) * width).astype(np.int32 if U * width < 2**31 else np.int64)[:, None]
    return np.asarray(table_UT.ravel().take(position_NUK + row_U1))


def _unrecorded(mass_NUK: Floats, unseen_NU: Ints) -> Floats:
    """Bound the mass of attended positions that were not recorded: none has more than a recorded one."""
    left_NU = np.maximum(0, 1 - mass_NUK.sum(-1))
    return np.asarray(np.minimum(left_NU, unseen_NU * mass_NUK.min(-1)))


def held_before(supports: Supports, step: int, new_NUK: Positions) -> Bools:
    """Say which positions of later steps' supports are in a step's support, [N, U, K]."""
    old_UK = supports.position_NUK[step]
    table_UT = np.zeros((len(old_UK), int(supports.length_N[-1]) + 1), np.bool_)
    table_UT[np.arange(len(old_UK))[:, None], old_UK] = True
    table_UT[:, -1] = False  # where the padded -1 went
    return _look_up(table_UT, new_NUK)


def overlap_after(supports: Supports, slow: int, new_NUK: Positions) -> Floats:
    """Return the overlap coefficient of later steps' supports with that of a step, [N, U]."""
    old_UK = supports.position_NUK[slow]
    both_NU = held_before(supports, slow, new_NUK).sum(-1)
    least_NU = np.minimum((old_UK >= 0).sum(-1), (new_NUK >= 0).sum(-1))
    return np.asarray(both_NU / np.maximum(1, least_NU))
