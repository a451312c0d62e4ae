"""The cycles of a lossless run over a known text: a Markov chain of drafts and verifications.

From a step on, the draft's length follows from the text and the settings; how much of it is kept is chance.
Two simplifications: the tokens after a wrong one end a draft where the right ones would, and a text ends by
its limit, not by a stop token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sfi_traces.tune.lossless.acceptance import Acceptance, Floats
from sfi_traces.tune.lossless.outcome import Costs, Outcome
from sfi_traces.tune.lossless.texts import Ints, Text

# what a cycle adds to: verifications, drafted, accepted, tokens attended, bytes, tested, known ones of them
SUMS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When drafts are verified.

    Attributes:
        token_ids: T_trig; None verifies at no boundary and no T_max.
        trigger_delay: Steps from a boundary to its slow step.
        min_gap: Steps from a verification before which a trigger does not count.
        t_max: The most fast steps in a row.
        slow_start: Steps from step 0 on that are slow.
        max_tokens: The most drafted tokens.
    """

    token_ids: frozenset[int] | None
    trigger_delay: int
    min_gap: int
    t_max: int
    slow_start: int
    max_tokens: int

    def lengths(self, tokens: Sequence[int]) -> Ints:
        """Return how many tokens are drafted after each step but the last, with a fresh selection, [T - 1].

        As `Trigger.reason` and `DraftRule.reason` decide: step s + j ends a draft of j tokens after step s.
        """
        last = len(tokens) - 1
        step_S = np.arange(last)
        length_S = np.minimum(self.max_tokens, last - 1 - step_S)
        length_S = np.where(step_S + 1 < self.slow_start, 0, length_S)
        if self.token_ids is None:
            return length_S
        length_S = np.minimum(length_S, self.t_max)
        ends_T = np.isin(tokens, [*self.token_ids])
        fires_T = np.zeros(len(tokens), bool)
        fires_T[self.trigger_delay :] = ends_T[: max(0, len(tokens) - self.trigger_delay)]
        for drafted in range(int(length_S.max(initial=0)), -1, -1):
            if drafted + 1 >= self.min_gap:
                place_S = np.minimum(step_S + drafted, last)
                length_S = np.where(
                    fires_T[place_S] & (drafted < length_S), drafted, length_S
                )  # an earlier one comes later in this loop
        return length_S


def expected(
    texts: Sequence[Text],
    schedules: Sequence[Schedule],
    acceptance: Acceptance,
    sentences: frozenset[int],
    costs: Costs,
    *,
    repeats: bool,
) -> list[Outcome]:
    """Predict runs over texts under some schedules.

    Args:
        texts: The texts.
        schedules: At least one.
        acceptance: How often a token is kept.
        sentences: Tokens that end a sentence, as `acceptance` counted them.
        costs: What a pass reads.
        repeats: Whether a slow step of its own follows a rejection.

    Returns:
        The outcome of each schedule.
    """
    most = max(one.max_tokens for one in schedules)
    sum_CF = np.zeros((len(schedules), SUMS))
    for text in texts:
        length_CS = np.stack([one.lengths(text.tokens) for one in schedules])
        rates = acceptance.rates(text.places(sentences), most)
        chain = _Chain.of(text, *rates, costs)
        sum_CF += chain.sums(length_CS, repeats=repeats)
    context = np.concatenate([text.context_T[1:] for text in texts])
    full = float(np.sum(context)), float(np.sum(costs.model.dense(context)))
    return [
        Outcome(
            tokens=len(context),
            verifications=float(sums[0]),
            drafted=float(sums[1]),
            accepted=float(sums[2]),
            read_tokens=float(sums[3]),
            bytes=float(sums[4]),
            full_tokens=full[0],
            full_bytes=full[1],
            known=float(sums[6] / sums[5]) if sums[5] else 1.0,
        )
        for sums in sum_CF
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    # kept_SM: chance that a draft after step s keeps at least m tokens, [S, M + 1];
    # added_SMF: what the cycle after step s adds with m drafted tokens, [S, M + 1, SUMS]
    kept_SM: Floats
    added_SMF: Floats

    @classmethod
    def of(cls, text: Text, rate_TM: Floats, known_TM: Floats, costs: Costs) -> "_Chain":
        rate_SM, known_SM = rate_TM[:-1], known_TM[:-1]
        count, most = rate_SM.shape
        one_S1 = np.ones((count, 1))
        kept_SM = np.concatenate([one_S1, np.cumprod(rate_SM, 1)], 1)
        step_SM = np.arange(count)[:, None] + 1 + np.arange(most + 1)
        length_SM = text.context_T[np.minimum(step_SM, count)].astype(np.float64)
        before_SM = length_SM[:, :-1]  # the cache of the drafting step at depth 1, 2, ...
        attended_SM = costs.drafting(before_SM, np.arange(1, most + 1)[None, :])

        def total(each_SM: Floats) -> Floats:
            return np.concatenate([0 * one_S1, np.cumsum(each_SM, 1)], 1)

        added = [
            np.ones((count, most + 1)),
            total(np.ones((count, most))),
            total(kept_SM[:, 1:]),
            total(np.asarray(attended_SM)) + length_SM,
            total(np.asarray(costs.fast(before_SM, attended_SM)))
            + np.asarray(costs.slow(length_SM)),
            total(kept_SM[:, :-1]),
            total(kept_SM[:, :-1] * known_SM),
        ]
        return cls(kept_SM=kept_SM, added_SMF=np.stack(added, 2))

    def sums(self, length_CS: Ints, *, repeats: bool) -> Floats:
        """Go back from the text's end: expected sums from its first step on, of each schedule, [C, SUMS]."""
        steps, wide, sums = self.added_SMF.shape
        candidates = np.arange(len(length_CS))
        place_M = np.arange(wide)
        # what is still to come from the next step, the one after it, ..., with and without a selection
        fresh_MCF = np.zeros((wide, len(candidates), sums))
        stale_MCF = np.zeros_like(fresh_MCF)
        for step in reversed(range(steps)):
            length_C = length_CS[:, step]
            kept_M = self.kept_SM[step]
            wrong_M = kept_M - np.append(kept_M[1:], 0.0)
            wrong_CM = np.where(place_M < length_C[:, None], wrong_M, 0.0)
            now_CF = self.added_SMF[step, length_C] + np.einsum("cm,mcf->cf", wrong_CM, stale_MCF)
            now_CF += kept_M[length_C][:, None] * fresh_MCF[length_C, candidates]
            again_CF = self.added_SMF[step, 0] + fresh_MCF[0] if repeats else now_CF
            fresh_MCF = np.concatenate([now_CF[None], fresh_MCF[:-1]])
            stale_MCF = np.concatenate([again_CF[None], stale_MCF[:-1]])
        total_CF: Floats = fresh_MCF[0]
        return total_CF
