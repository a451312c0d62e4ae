"""The rules of selection health, in one table; each threshold has its reason.

"Measured" is on the bundled example (8,068 tokens of prompt, 4 layers x 2 KV heads, audit of every step):
under the default settings, whose answer is right; under presets `paper` and `released`, streaming-llm and
quest, whose answers are wrong: all but `paper` end by repeating a word.
"""

from dataclasses import dataclass
from functools import partial
from math import inf

from sfi_traces.health import measures
from sfi_traces.health.measures import RECORD_AUDIT, RECORD_POSITIONS, RECORD_SELECTOR, Measure

NEGLIGIBLE_KL = 0.01  # nats; below, a step's next token hardly changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that may be wrong with a run's selections, so that it loses what it needs.

    Attributes:
        threshold: Values of at least this are beyond the rule; `reason` says why.
        least: `samples` (refreshes, steps, tokens) that a value needs to be judged.
        share: Share of a request's KV heads that must be beyond the threshold.
        alone: A value that is a finding in a single KV head.
        means: The finding in words, with `{value}`, a percentage where `percent`, perhaps of `{of}` samples.
        needs: How to record what the rule needs.
        unnests: Whether the rule unnests lists of positions, which takes longer.
    """

    name: str
    measure: Measure
    threshold: float
    reason: str
    least: int = 1
    share: float = 0.0
    alone: float = inf
    means: str
    advice: str
    needs: str
    samples: str = "steps"
    percent: bool = True
    unnests: bool = False


RULES = (
    Rule(
        name="never_fast", measure=measures.never_fast,
        threshold=1.0, least=32, needs="the table steps is empty",
        reason="32 steps in a row that are all slow are no accident: t_max alone allows a fast one after each",
        means="{value} of the steps were slow: the sparse path never ran",
        advice="look at the reasons of slow steps in `sfi trace show`, and at the trigger settings",
    ),
    Rule(
        name="trigger_never", measure=partial(measures.trigger_share, "NOT trigger"),
        threshold=1.0, least=200, needs="the table steps is empty", samples="tokens",
        reason="200 tokens of prose or code hold several sentence ends or line breaks; the example has one in 10",
        means="{value} of the generated tokens are outside T_trig: no sentence ever ended, t_max alone refreshes",
        advice="`sfi doctor --model ...` lists the tokens that end a sentence; set triggers or trigger_token_ids",
    ),
    Rule(
        name="trigger_always", measure=partial(measures.trigger_share, "trigger"),
        threshold=0.5, least=32, needs="the table steps is empty", samples="tokens",
        reason="at one slow step in two, refreshes cost more than the fast steps save; the example has 10 %",
        means="{value} of the generated tokens are in T_trig",
        advice="choose fewer triggers (`sfi tune` compares sets), or raise min_gap",
    ),
    Rule(
        name="evidence_broken", measure=partial(
            measures.of_selector,
            "avg((evidence_norm2 IS NULL OR NOT isfinite(evidence_norm2) OR evidence_norm2 <= 0 "
            "OR lambda_star IS NULL OR NOT isfinite(lambda_star))::INT)",  # NaN is recorded as null
            "coalesce(chosen_selections.reason, '') = ''",
        ),
        threshold=0.01, needs=RECORD_SELECTOR, samples="refreshes",
        reason="the evidence is a distribution: its squared norm is finite and above 0 at every refresh, so that a "
        "single head that breaks this often is a bug; 1 % leaves a refresh with nothing to select from aside",
        means="{value} of the refreshes have evidence or lambda* that is zero, infinite or no number",
        advice="look for infinities in the attention logits (dtype, masks); report it with the trace",
    ),
    Rule(
        name="evidence_flat",
        measure=partial(measures.of_selector, "avg(exp(evidence_entropy) / {allowed})", "{allowed} > 2 * selected"),
        threshold=0.98, least=2, share=0.5, needs=RECORD_SELECTOR, samples="refreshes",
        reason="exp(evidence_entropy) is how many positions the evidence is spread over; measured at most "
        ".70 of those allowed, in a last layer that attends to everything; equal scores give 1",
        means="the evidence is spread evenly over {value} of the allowed positions: all scores are equal",
        advice="the Selector is given nothing to choose by: check the queries and logits that it gets, alpha",
    ),
    Rule(
        name="selection_trailing", measure=measures.selection_trailing,
        threshold=0.95, share=0.5, needs=RECORD_POSITIONS, unnests=True,
        reason="a selection that is the last positions before the recent window is a longer window; measured .00 to "
        ".03 (default) and .19 to .26 (paper). Half of the heads, for a single head may well be local",
        means="{value} of the selected positions are the last ones before the recent window: a window was selected",
        advice="check that the scores reach the Top-K in order; a longer recent window gives the same for less",
    ),
    Rule(
        name="selection_same", measure=measures.selection_same,
        threshold=0.9, needs=RECORD_POSITIONS,
        reason="heads score by their own queries and keys; hundreds of equal positions do not happen by chance",
        means="all KV heads of a layer selected the same positions in {value} of its refreshes",
        advice="check that scores are taken by head (a broadcast dimension, scores of zero); if heads shall "
        "share a selection, this says so",
    ),
    Rule(
        name="selection_frozen", measure=measures.selection_frozen,
        threshold=1.0, least=3, share=0.5,
        needs="it takes four refreshes or more", samples="refreshes after the first",
        reason="measured .54 to .98 of a selection is new at a refresh; three refreshes without one new "
        "position while the text goes on are a selection that was not made anew",
        means="{value} of the refreshes changed not one selected position",
        advice="check that refreshes score with the new query, and that their result is used",
    ),
    Rule(
        name="selection_missed", measure=measures.selection_missed,
        threshold=0.5, least=3, needs="it takes three slow steps of the trigger, or of t_max", samples="slow steps",
        reason="a slow step attends to everything so that the Selector selects anew: it leaves a selection in each "
        "layer, perhaps an empty one",
        means="after {value} of the slow steps no layer selected anew: fast steps read an old selection",
        advice="check that the policy's select_after returns a selection, and that its work is waited for",
    ),
    Rule(
        name="sink_unread", measure=measures.sink_unread,
        threshold=0.05, least=4, share=0.1, needs=RECORD_AUDIT, unnests=True,
        reason="a model with sinks gives its first tokens a large share of the mass in most heads, and "
        "fails where they are evicted (StreamingLLM); .05 is far above what four of 1,000 tokens get by "
        "chance (.004). The bundled checkpoint has no sinks: measured below .001",
        means="the first 4 positions carry {value} of the dense mass, and were not read",
        advice="set sink=4 or more",
    ),
    Rule(
        name="top_1_dropped", measure=measures.top_1_dropped,
        threshold=0.2, least=8, share=0.1, alone=0.5, needs=RECORD_AUDIT,
        reason="only steps whose largest probability is .05 or more count: in a diffuse head (measured in "
        "the last layer) the first of thousands of equals says nothing, and a run that drops it may have the "
        "right answer. A fifth of such steps, or of the first 32, whichever is more: measured .06 in the run "
        "with the right answer, .25 to .90 in four with a wrong one; .09 with scores of zero (others see it). A single "
        "head has .32 at most in the sound runs of docs/evidence/health.md, and .6 to 1 where its choice is broken",
        means="the most probable position of dense attention was not read in {value} of {of} steps where it "
        "stands out",
        advice="raise budget, or refresh more often (t_max, triggers); retained mass alone does not show this",
    ),
    Rule(
        name="look_back", measure=measures.look_back,
        threshold=0.05, least=8, share=0.25, needs=RECORD_AUDIT, unnests=True,
        reason="the mass of everything that lies further back than any selected token; what a selection of "
        "the whole context loses there is nothing, and 5 % in a quarter of the heads is more than the "
        "recent window can stand for",
        means="{value} of the dense mass lies further back than any position that was selected or recent",
        advice="select from the whole context (a window alone cannot answer), or raise budget",
    ),
    Rule(
        name="fast_disagrees", measure=measures.fast_disagrees,
        threshold=0.1, least=30, needs=RECORD_AUDIT,
        reason="the last thing to see, and the plainest. Of all fast steps or of the first 32, whichever is "
        "more: a run that has gone wrong repeats a word, and dense attention then repeats it too. Measured 0 "
        "in the run with the right answer, .13 to .34 in four with a wrong one (.06 with scores of zero). Of "
        "32 steps 10 % are four; where one step in 100 differs, that comes once in 3,000 runs",
        means="{value} of {of} fast steps have another most probable token than dense attention",
        advice="see what the other rules say of the selection; raise budget, lower t_max, or use --lossless",
    ),
    Rule(
        name="fast_kl", measure=measures.fast_kl,
        threshold=0.1, least=30, needs=RECORD_AUDIT, percent=False,
        reason="at .1 nats the right token has lost a tenth of its probability, also where it stays the most probable. "
        "Measured .044 at most in the sound runs of docs/evidence/health.md, more in 22 of the broken ones",
        means="the KL to dense attention's next token is {value} nats, the mean of {of} fast steps",
        advice="see what the other rules say of the selection; raise budget, lower t_max, or use --lossless",
    ),
    Rule(
        name="drift_agreement",
        measure=partial(measures.fall, "SELECT request, step, argmax_agrees::INT AS value FROM chosen_logits"),
        threshold=0.15, least=30, needs=RECORD_AUDIT,
        reason="first against last third of the fast steps; counted only beyond 3 standard errors, so that "
        "15 points are no accident",
        means="agreement with dense attention's token falls by {value} from the run's first third to its last",
        advice="errors add up in the cache: refresh more often, set dense_layers, or use --lossless",
    ),
    Rule(
        name="drift_kl", measure=partial(
            measures.fall,
            f"SELECT request, step, -ln(greatest(kl_next_token, {NEGLIGIBLE_KL})) AS value FROM chosen_logits "  # noqa: S608
            "WHERE isfinite(kl_next_token)",
        ),
        threshold=1.4, least=30, needs=RECORD_AUDIT, percent=False,
        reason="mean of ln KL, first against last third, beyond 3 standard errors; 1.4 is four times the "
        "KL. A last third below .01 nats does not count",
        means="the logarithm of the KL to dense attention's next token rises by {value}",
        advice="errors add up in the cache: refresh more often, set dense_layers, or use --lossless",
    ),
)  # fmt: skip
