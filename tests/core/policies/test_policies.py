"""Every policy of the table on a tiny random model, and what sets each of them apart."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

import sfi_core
from sfi_core.engine.batch_pass import allowed_positions
from sfi_core.observers.events import SelectionEvent, StepEvent
from sfi_core.policies import POLICIES, LayerContext, Policy, Triggered
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.selector import selector
from tests.covering import case
from tests.fakes import RecordingObserver, layer_context

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DOCS = Path(__file__).parents[3] / "docs"
SINK, RECENT, BUDGET, T_MAX, NEW = 3, 6, 5, 4, 16
PROMPTS = [list(range(40, 90)), [7, 8], list(range(20))]  # ragged; one is shorter than the sink
LAYERS = (0, 1)
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=SINK, recent=RECENT, budget=BUDGET, t_max=T_MAX, stride=T_MAX + 1,
    trigger_delay=0, trigger_token_ids=tuple(range(0, 96, 5)),
).replace(
    freekv={"page": 4},
    synckv={"heads": "even", "stride": T_MAX + 1, "suspension": "sparse"},  # test_synckv.py has heads that read all
)  # fmt: skip
MODES = ["anchored", "sliding"]
# the other policies have one mode: their runs are the same in both, as a test below counts
RUNS = [
    case(policy, mode, kept=mode == "anchored" or issubclass(POLICIES[policy], Triggered))
    for policy in POLICIES
    for mode in MODES
]


@pytest.fixture(scope="module")
def complete(tiny_model):
    """Run a policy once per module and setting; return the report and what was observed."""

    @cache
    def run(policy: str, mode: str = "anchored", only: int | None = None):
        prompts = PROMPTS if only is None else [PROMPTS[only]]
        observer = RecordingObserver()
        result = sfi_core.generate(
            tiny_model, None, prompts, CONFIG.replace(recent_mode=mode), policy=policy, max_new_tokens=NEW,
            stop_token_ids=(), observers=[observer],
        )  # fmt: skip
        return result.report, observer

    return run


def sink_of(request: int) -> int:
    return min(SINK, len(PROMPTS[request]))


def candidates(event: SelectionEvent, ahead: int = 0) -> range:
    """J at a refresh, from the prompt's length alone: sliding or slow, it ends `recent` tokens ago."""
    length = len(PROMPTS[event.request]) + event.step + ahead
    sink = sink_of(event.request)
    return range(sink, max(sink, length - RECENT))


def selects(policy: str, event: SelectionEvent) -> bool:
    """Say whether anything is selected; step 0 is dense and packs the sinks of those who select later."""
    chosen = make(policy)
    return chosen.ahead or (event.step > 0 if chosen.chooses else chosen.selects_after)


def most_tokens(policy: str, mode: str, event: StepEvent) -> float:
    config = make(policy, CONFIG.replace(recent_mode=mode)).config
    sparse = SINK + BUDGET + RECENT
    if config.recent_mode == "anchored":  # SnapKV keeps what was decoded
        sparse += event.step if policy == "snapkv" else T_MAX
    dense = len(config.dense_layers) / len(LAYERS)  # FreeKV's
    return (1 - dense) * sparse + dense * event.context_tokens


@pytest.mark.parametrize(("policy", "mode"), RUNS)
def test_a_fast_step_reads_no_more_than_the_budget(complete, policy: str, mode: str):
    """Sink, recent and selected tokens; an anchored window grows by up to t_max."""
    _, observer = complete(policy, mode)
    fast = [event for event in observer.steps if not event.slow]
    assert bool(fast) == (policy != "full-kv")
    for event in fast:
        assert event.attended_tokens <= most_tokens(policy, mode, event)
        assert event.attended_tokens <= event.context_tokens


@pytest.mark.parametrize(("policy", "mode"), RUNS)
def test_selected_positions_are_candidates_ascending_and_unique(complete, policy: str, mode: str):
    _, observer = complete(policy, mode)
    for event in observer.selections:
        # what serves the next step is selected among what has left the window by then
        ahead = policy == "freekv" and event.reason != "correction"
        allowed = candidates(event, int(ahead))
        index = event.index_HK.tolist()
        if not selects(policy, event):
            assert index == [[], []]
            continue
        for head in index:
            chosen = [position for position in head if position >= 0]
            assert head == chosen + [-1] * (len(head) - len(chosen))
            assert chosen == sorted(set(chosen))
            assert set(chosen) <= set(allowed)
            room = min(BUDGET, len(allowed))
            assert len(chosen) == room if POLICIES[policy].fills else len(chosen) <= room


@pytest.mark.parametrize(("policy", "mode"), RUNS)
def test_a_row_of_a_ragged_batch_equals_the_row_alone(complete, policy: str, mode: str):
    together, _ = complete(policy, mode)
    for row, request in enumerate(together.requests):
        alone, _ = complete(policy, mode, row)
        assert request == alone.requests[0]


def test_the_runs_above_differ_between_policies(complete):
    tokens = {str([r.token_ids for r in complete(policy, mode)[0].requests]) for policy in POLICIES for mode in MODES}
    # those that the trigger makes slow have both modes; the others have one
    assert len(tokens) == len(POLICIES) + sum(issubclass(policy, Triggered) for policy in POLICIES.values())


def test_the_page_on_policies_has_a_row_for_each():
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", (DOCS / "policies.md").read_text(), re.MULTILINE)) >= set(POLICIES)


@pytest.mark.parametrize(
    ("page", "sentence", "can"),
    [
        ("policies", r"`--set trigger_policy=NAME` works with (.*?):", lambda policy: issubclass(policy, Triggered)),
        ("lossless", r"Drafters are (.*?)\.", lambda policy: policy.drafts),
        ("two_tier", r"These can run in two tiers: (.*?)\.", lambda policy: policy.offloads),
    ],
    ids=["trigger", "drafts", "offloads"],
)
def test_the_pages_name_what_can(page: str, sentence: str, can):
    (named,) = re.findall(sentence, (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert set(re.findall(r"`([a-z0-9-]+)`", named)) == {name for name, policy in POLICIES.items() if can(policy)}


def make(policy: str, config: SfiConfig = CONFIG) -> Policy:
    return POLICIES[policy](config, Trigger(frozenset(config.trigger_token_ids or ()), config), LAYERS)


def context(logits: torch.Tensor, length: int, budget_start: int = SINK) -> LayerContext:
    return layer_context(
        logits,
        allowed_BT=allowed_positions(length, torch.tensor([budget_start]), torch.tensor([length - RECENT])),
        key_norm_BHT=torch.rand(1, logits.shape[1], length) + 0.5,
    )


def plain_tokens(model, prompt: list[int], mask_row=None) -> list[int]:
    """Complete greedily without a cache; `mask_row` says which positions a decoded query reads."""
    ids = list(prompt)
    for _ in range(NEW):
        T = len(ids)
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        for query in range(len(prompt), T):
            if mask_row is not None:
                visible[query] &= mask_row(query)[:T]
        mask = torch.zeros(1, 1, T, T).masked_fill(~visible, -torch.inf)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_full_kv_is_the_plain_model(complete, tiny_model):
    report, _ = complete("full-kv")
    for prompt, request in zip(PROMPTS, report.requests, strict=True):
        assert request.token_ids == plain_tokens(tiny_model, prompt)
        assert request.reasons == {"first": 1, "full-kv": NEW - 1}
        assert request.read_ratio == 1


def test_streaming_llm_reads_sink_and_last_tokens_and_nothing_else(complete, tiny_model):
    """The plain model under that mask says the same tokens; the budget widens the window."""
    report, _ = complete("streaming-llm")
    for row, (prompt, request) in enumerate(zip(PROMPTS, report.requests, strict=True)):

        def read(query: int, sink: int = sink_of(row)) -> torch.Tensor:
            position = torch.arange(200)
            return (position < sink) | (position > query - RECENT - BUDGET)

        assert request.token_ids == plain_tokens(tiny_model, prompt, read)
        assert request.slow_at == [0]
    attended = complete("streaming-llm")[1].steps[-len(PROMPTS)].attended_tokens
    assert attended == SINK + RECENT + BUDGET


def test_sfi_refreshes_every_layer_on_slow_steps_and_never_on_fast_ones(complete):
    report, observer = complete("sfi")
    for row, request in enumerate(report.requests):
        refreshed = [(e.step, e.layer) for e in observer.selections if e.request == row]
        assert refreshed == [(step, layer) for step in request.slow_at for layer in (0, 1)]


def test_sfi_selects_the_best_scores_of_the_selector():
    logits = torch.randn(1, 2, 2, 1, 30)
    layer = context(logits, 30)
    settings = CONFIG.to_dict()["selector"]
    score, _ = selector(logits, layer.key_norm_BHT, layer.allowed_BT, **settings)
    best = score.argsort(-1, descending=True)[..., :BUDGET].sort(-1).values
    assert torch.equal(make("sfi").select_after(layer).index_BHK.long(), best)


@pytest.mark.parametrize("observed", [True, False])
def test_who_listens_to_selections_gets_their_diagnostics(tiny_model, monkeypatch, *, observed):
    heard = set()
    select_after = POLICIES["sfi"].select_after
    monkeypatch.setattr(
        POLICIES["sfi"], "select_after", lambda self, c: heard.add(c.wants_diagnostics) or select_after(self, c)
    )
    watch = [RecordingObserver()] if observed else []
    sfi_core.generate(tiny_model, None, PROMPTS, CONFIG, max_new_tokens=2, observers=watch)
    assert heard == {observed}


@pytest.mark.parametrize(("setting", "value"), [("span", 3), ("selector", {"lambda_clip": 1.0})])
def test_sfi_hands_its_settings_to_the_selector(setting: str, value):
    logits = 3 * torch.randn(1, 2, 4, 2, 200)
    layer = context(logits, 200)
    changed = make("sfi", CONFIG.replace(budget=20, **{setting: value})).select_after(layer)
    same = make("sfi", CONFIG.replace(budget=20)).select_after(layer)
    assert not torch.equal(changed.index_BHK, same.index_BHK)


def test_oracle_top_k_picks_the_positions_with_most_attention():
    """Recomputed from its own logits: the mean over a KV head's queries, within J."""
    logits = 3 * torch.randn(1, 2, 4, 1, 40)
    index = make("oracle-top-k").most_attended(context(logits, 40)).index_BHK
    within = logits.double()[..., SINK : 40 - RECENT]
    probability = within.softmax(-1).mean(dim=(2, 3))
    best = probability.topk(BUDGET).indices.sort(-1).values + SINK
    assert torch.equal(index.long(), best)


def test_oracle_top_k_selects_anew_at_every_step(complete):
    _, observer = complete("oracle-top-k")
    steps = [e.step for e in observer.selections if (e.request, e.layer) == (0, 1) and e.index_HK.numel()]
    assert steps == list(range(1, NEW))


PLANS = {"full-kv": ["full-kv", "full-kv"], "synckv": ["", "anticipation"]}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_of_a_batch_decides_alone(policy: str):
    """At step 0 a trigger has fired for the first; the second is at `t_max`. The policies not named never ask."""
    requests = [RequestState(step=0, tokens=[5]), RequestState(step=T_MAX, tokens=[6])]
    by_trigger = ["trigger" if issubclass(POLICIES[policy], Triggered) else "", ""]
    assert make(policy).plan(requests) == PLANS.get(policy, by_trigger)


def test_a_policy_s_own_settings_leave_the_caller_s_alone():
    adapted = make("streaming-llm").config
    assert (adapted.recent, adapted.recent_mode) == (RECENT + BUDGET, "sliding")
    assert (CONFIG.recent, CONFIG.recent_mode) == (RECENT, "anchored")
