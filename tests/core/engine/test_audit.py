"""The audit: dense attention in the shadow, the run as it was."""

import math
from functools import cache

import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, EngineOptions, Sampling, SfiConfig, slow_fast
from sfi_core.engine.audit import compare_logits, divergence
from sfi_core.errors import ConfigError
from tests.architectures import padded, prompts, tiny
from tests.core.conftest import tiny_qwen3
from tests.fakes import RecordingObserver, tokens

NEW, TOP = 12, 20
ROWS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 17, 6)]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=5, budget=6, t_max=3, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 9)),
)  # fmt: skip
AUDIT = AuditConfig(every=1, top=TOP)


@cache
def model():
    return tiny_qwen3()


def complete(**options):
    options = {"config": CONFIG, "max_new_tokens": NEW, "stop_token_ids": (), **options}
    return sfi_core.generate(options.pop("model", model()), None, options.pop("rows", ROWS), **options)


@cache
def audited(policy: str = "sfi", every: int = 1):
    observer = RecordingObserver()
    audit = AuditConfig(every=every, top=TOP)
    return complete(policy=policy, observers=[observer], audit=audit), observer


def dense_attentions(row: int, step: int):
    """Attend with transformers' own eager attention, to the tokens that the full-kv run had cached."""
    result, _ = audited("full-kv")
    ids = ROWS[row] + result.report.requests[row].token_ids[:step]
    eager = tiny_qwen3()
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        output = eager(torch.tensor([ids]), output_attentions=True)
    return output.attentions, output.logits[0, -1]


@pytest.mark.parametrize("policy", ["sfi", "full-kv", "oracle-top-k"])
def test_an_audit_changes_neither_a_token_nor_what_ran(policy):
    plain, watched = complete(policy=policy, engine=EngineOptions(graphs=False)), audited(policy)[0]
    assert tokens(watched) == tokens(plain)
    assert watched.report.paths == plain.report.paths
    assert [r.slow_at for r in watched.report.requests] == [r.slow_at for r in plain.report.requests]


def test_an_audit_leaves_the_seed_alone():
    sampling = Sampling(temperature=1.5)
    plain = complete(sampling=sampling, seed=3)
    watched = complete(sampling=sampling, seed=3, observers=[RecordingObserver()], audit=AUDIT)
    assert tokens(watched) == tokens(plain)


@pytest.mark.parametrize("label", ["gemma-2", "gpt-oss", "deepseek-v3", "gpt-2"])
def test_sliding_windows_sinks_and_latents_are_as_they_were(label):
    settings = {"model": tiny(label), "rows": prompts(40, 17)}
    observer = RecordingObserver()
    watched = complete(**settings, observers=[observer], audit=AUDIT)
    assert tokens(watched) == tokens(complete(**settings))
    assert observer.logits
    assert max(float(event.output_error_H.max()) for event in observer.audits) > 0


def test_an_audit_inside_transformers_own_loop_sees_the_same():
    observer = RecordingObserver()
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with slow_fast(model(), None, CONFIG, observers=[observer], audit=AUDIT):
        output = model().generate(**padded(ROWS), **options)
    result, expected = audited()
    assert output[:, -NEW:].tolist() == tokens(result)
    assert len(observer.audits) == len(expected.audits)
    for ours, theirs in zip(observer.logits, expected.logits, strict=True):
        assert ours.requests == theirs.requests
        torch.testing.assert_close(ours.kl_R, theirs.kl_R)


@pytest.mark.parametrize("step", [0, NEW - 1])
def test_a_support_holds_the_most_attended_positions_of_dense_attention(step):
    _, observer = audited("full-kv")
    for row in range(len(ROWS)):
        attentions, _ = dense_attentions(row, step)
        for event in observer.audits:
            if (event.request, event.step) != (row, step):
                continue
            mass_HT = attentions[event.layer][0, :, -1].unflatten(0, (2, 2)).mean(1)
            K = min(TOP, mass_HT.shape[1])
            expected = mass_HT.topk(K).indices.sort().values
            assert torch.equal(event.index_HK[:, :K].long(), expected)
            torch.testing.assert_close(event.mass_HK[:, :K], mass_HT.gather(1, expected))
            assert (event.index_HK[:, K:] == -1).all()


def test_retained_mass_is_that_of_the_positions_the_step_read():
    """At step 1 the cache is still the plain model's: probabilities are those of its own weights."""
    result, observer = complete(observers=[recording := RecordingObserver()], audit=AUDIT), recording
    seen: list[tuple[bool, float]] = []
    for row, ids in enumerate(ROWS):
        request = result.report.requests[row]
        assert 1 not in request.slow_at
        eager = tiny_qwen3()
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            output = eager(torch.tensor([ids + request.token_ids[:1]]), output_attentions=True)
        mass_HGT = output.attentions[0][0, :, -1].unflatten(0, (2, 2))
        picked = next(s for s in observer.selections if (s.request, s.step, s.layer) == (row, 0, 0))
        event = next(a for a in observer.audits if (a.request, a.step, a.layer) == (row, 1, 0))
        for head in range(2):
            start = max(CONFIG.sink, len(ids) - CONFIG.recent)
            read = {*range(CONFIG.sink), *picked.index_HK[head].tolist(), *range(start, len(ids) + 1)}
            kept_G = mass_HGT[head][:, sorted(read - {-1})].sum(-1)
            torch.testing.assert_close(event.retained_H[head], kept_G.mean())
            torch.testing.assert_close(event.retained_min_H[head], kept_G.min())
            top = mass_HGT[head].argmax(-1).tolist()
            assert event.top_1_read_H[head] == sum(position in read for position in top) / 2
            support = event.index_HK[head].tolist()
            assert event.read_HK[head].tolist()[: len(ids) + 1] == [
                position in read for position in support[: len(ids) + 1]
            ]
            seen.append((bool(event.read_HK[head].all()), float(event.top_1_read_H[head])))
    assert len(set(seen)) > 2  # not every row is read whole, nor none


def test_retained_mass_and_output_error_of_a_slow_step_are_exact():
    _, observer = audited()
    slow = [event for event in observer.audits if event.slow]
    assert slow
    assert all((e.retained_H == 1).all() and (e.output_error_H == 0).all() for e in slow)
    assert all(e.read_HK.all() and (e.top_1_read_H == 1).all() for e in slow)
    fast = [event for event in observer.audits if not event.slow and event.request == 0]
    assert all((e.retained_H < 1).all() and (e.output_error_H > 0).all() for e in fast)


def test_the_shadows_distribution_is_dense_attentions():
    """Step 1 follows a dense step, so that the plain model gives the same distribution."""
    seen: list[torch.Tensor] = []
    observer = RecordingObserver()
    hook = model().register_forward_hook(lambda m, a, output: seen.append(output.logits[:, -1]))
    try:
        result = complete(rows=ROWS[:1], observers=[observer], audit=AUDIT, max_new_tokens=2)
    finally:
        hook.remove()
    with torch.no_grad():
        ids = torch.tensor([ROWS[0] + result.report.requests[0].token_ids[:1]])
        dense = tiny_qwen3()(ids).logits[0, -1].double().softmax(-1)
    ours = seen[-1][0].double().softmax(-1)
    (event,) = observer.logits
    expected = float((dense * (dense / ours).log()).sum())
    assert (event.steps, event.requests) == ((1,), (0,))
    assert float(event.kl_R[0]) == pytest.approx(expected, rel=1e-3)
    assert bool(event.agrees_R[0]) == bool(ours.argmax() == dense.argmax())
    assert int(event.dense_token_R[0]) == int(dense.argmax())
    assert float(event.dense_probability_R[0]) == pytest.approx(float(dense.max()), rel=1e-4)


def test_with_room_for_everything_nothing_is_lost():
    observer = RecordingObserver()
    complete(config=CONFIG.replace(budget=100), observers=[observer], audit=AUDIT)
    assert max(float(event.kl_R.max()) for event in observer.logits) < 1e-6
    for event in observer.audits:
        torch.testing.assert_close(event.retained_H, torch.ones(2))
        assert float(event.output_error_H.max()) < 1e-5


def test_the_query_cosine_is_that_of_neighbouring_steps():
    queries: dict[tuple[int, int], torch.Tensor] = {}
    _, observer = audited("full-kv")
    first = [event for event in observer.audits if event.step == 0]
    assert all(event.query_cosine_H.isnan().all() for event in first)
    attention = model().model.layers[0].self_attn
    recorded: list[torch.Tensor] = []
    hook = attention.q_norm.register_forward_hook(lambda m, a, out: recorded.append(out))
    try:
        complete(policy="full-kv", rows=ROWS[:1])
    finally:
        hook.remove()
    steps = [out[0, -1] for out in recorded if out.shape[1] == 1 or out.shape[1] == len(ROWS[0])]
    rotary = model().model.rotary_emb
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb  # noqa: PLC0415

    for step, normed in enumerate(steps):
        place = torch.tensor([[len(ROWS[0]) - 1 + step]])
        cos, sin = rotary(normed, place)
        query = normed[None, :, None]  # [1, heads, 1, D]
        rotated, _ = apply_rotary_pos_emb(query, query, cos, sin)
        queries[0, step] = rotated[0, :, 0]
    for step in range(1, NEW):
        expected = torch.cosine_similarity(queries[0, step], queries[0, step - 1], -1)
        event = next(a for a in observer.audits if (a.request, a.step, a.layer) == (0, step, 0))
        torch.testing.assert_close(event.query_cosine_H, expected.view(2, 2).mean(1))


@pytest.mark.parametrize("every", [1, 3])
def test_every_nth_step_and_every_slow_step_is_audited(every):
    result, observer = audited(every=every)
    for row, request in enumerate(result.report.requests):
        due = sorted({*request.slow_at, *range(0, NEW, every)})
        for layer in range(2):
            steps = [e.step for e in observer.audits if (e.request, e.layer) == (row, layer)]
            assert steps == due
        assert [e.step for e in observer.steps if e.request == row and e.audited] == due


def test_only_the_chosen_layers_are_audited():
    observer = RecordingObserver()
    audit = AuditConfig(top=TOP, layers=(1,))
    complete(observers=[observer], audit=audit)
    everything = [event for event in audited()[1].audits if event.layer == 1]
    assert len(observer.audits) == len(everything)
    for event, all_of_it in zip(observer.audits, everything, strict=True):
        assert (event.layer, event.heads) == (1, (0, 1))
        assert torch.equal(event.index_HK, all_of_it.index_HK)
        assert torch.equal(event.retained_H, all_of_it.retained_H)


def test_a_layer_left_dense_retains_everything():
    observer = RecordingObserver()
    complete(config=CONFIG.replace(dense_layers=(0,)), observers=[observer], audit=AUDIT)
    assert all((e.retained_H == 1).all() for e in observer.audits if e.layer == 0)
    assert not all((e.retained_H == 1).all() for e in observer.audits if e.layer == 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be positive, got 0"),
        ({"top": -3}, "top must be positive, got -3"),
        ({"layers": (0, 7)}, r"audit.layers must be among \[0, 1\], got \[7\]"),
    ],
)
def test_what_cannot_be_audited_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        complete(audit=AuditConfig(**settings))


def test_a_sliding_layer_cannot_be_audited():
    with pytest.raises(ConfigError, match=r"must be among \[1\], got \[0\]"):
        complete(model=tiny("gemma-2"), rows=prompts(9), audit=AuditConfig(layers=(0,)))


def test_the_divergence_of_two_coins():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    by_hand = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(p, q) == pytest.approx(by_hand, rel=1e-6)
    assert divergence(p, p) == 0
    never = torch.tensor([1.0, 0.0]).log()
    assert divergence(never, p) == pytest.approx(math.log(2))
    assert divergence(p, never) == math.inf
    assert divergence(p, q * math.nan).isnan()


def test_no_divergence_is_negative():
    dense_RV = 3 * torch.randn(256, 96)
    ours_RV = dense_RV + 1e-6 * torch.randn(256, 96)
    fields = compare_logits(ours_RV, dense_RV)
    assert fields["kl_R"].min() == 0
    assert fields["kl_R"].max() < 1e-5
    assert fields["agrees_R"].all()
