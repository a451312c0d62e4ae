"""CodeScan's rules, each from a run's own keys, values and queries."""

from functools import cache

import pytest
import torch

from sfi_core import EngineOptions, SfiConfig, generate
from sfi_core.policies.built_in import codescan
from sfi_core.policies.built_in.codescan import learn_basis
from sfi_kernels.code_scan import CodeBasis, bits_of, words
from sfi_kernels.code_scan.reference import diagnosed
from tests.architectures import tiny
from tests.fakes import RecordingObserver, coarse
from tests.watched import LAYERS, H, Seen, Watched, best_of, prompt_of, watched

SINK, RECENT, BUDGET, NEW, REST = 2, 5, 10, 12, 0.3
# 7 tokens are sink and recent ones alone, so that a basis is learned when a step has to choose, if ever
LENGTHS = (61, 7, 1, 24)
CONFIG = SfiConfig(sink=SINK, recent=RECENT, budget=BUDGET, trigger_policy="never").replace(codescan={"rest": REST})


@cache
def run(relearn: int = 128) -> tuple[Watched, list[tuple[torch.Tensor, torch.Tensor, CodeBasis]]]:
    learned = []

    def learn(key_HTD: torch.Tensor, query_HND: torch.Tensor) -> CodeBasis:
        basis = learn_basis(key_HTD, query_HND)
        learned.append((key_HTD.clone(), query_HND.clone(), basis))
        return basis

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codescan, "learn_basis", learn)
        patch.setattr(codescan, "RELEARN", relearn)
        rows = [prompt_of(length) for length in LENGTHS]
        return watched(rows, CONFIG, "codescan", NEW), learned


def bases_of(seen: list[Seen], relearn: int = 128) -> list[tuple[CodeBasis, int, torch.Tensor]]:
    """The bases of a layer and request, with the tokens that were cached then and its queries."""
    bases, whole_HTD = [], seen[-1].key_HTD
    for key_HTD, query_HND, basis in run(relearn)[1]:
        tokens = key_HTD.shape[1]
        if torch.equal(whole_HTD[:, SINK : SINK + tokens], key_HTD):
            bases.append((basis, SINK + tokens, query_HND))
    return bases


def estimate(seen: Seen, basis: CodeBasis, head: int) -> torch.Tensor:
    """The logits [G, T] from each key's levels, channel by channel."""
    scale = seen.query_HGD.shape[-1] ** -0.5
    mean_D, encode_DC, query_DC = (part[head].double() for part in basis)
    query_GD, key_TD = seen.query_HGD[head].double(), seen.key_HTD[head].double()
    logits_GT = (query_GD @ mean_D)[:, None].repeat(1, len(key_TD))
    for channel, bits in enumerate(bits_of(query_GD.shape[1])):
        level_T = ((key_TD - mean_D) @ encode_DC[:, channel]).floor()
        level_T = level_T.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        logits_GT += torch.outer(query_GD @ query_DC[:, channel], level_T + 0.5)
    return logits_GT * scale


def fast_steps(relearn: int = 128):
    """Every fast step of every request and layer, with the last basis before it, if there is any."""
    for (request, _), seen in run(relearn)[0].seen.items():
        bases = bases_of(seen, relearn)
        for step in seen[1:]:
            known = [basis for basis, tokens, _ in bases if tokens < step.tokens]
            yield request, step, known[-1:]


@pytest.mark.parametrize("relearn", [128, 3])
def test_a_step_reads_the_keys_whose_codes_promise_most(relearn: int):
    chosen = 0
    for request, seen, bases in fast_steps(relearn):
        first = min(SINK, LENGTHS[request])
        candidates = range(first, max(first, seen.tokens - RECENT))
        for head in range(H):
            expected = list(candidates)
            if len(candidates) > BUDGET:
                (basis,), chosen = bases, chosen + 1
                weight_GT = estimate(seen, basis, head)[:, first : candidates.stop].softmax(-1)
                score = [0.0] * first + coarse(weight_GT.mean(0)).tolist()
                expected = best_of(score, candidates, BUDGET)
            assert seen.packed[head] == [*range(first), *expected], (request, seen.step, head)
    assert chosen > 100


def test_the_pseudo_token_stands_for_what_is_not_read():
    """Its weight is a share of what the codes promise of the rest, its value the mean over J."""
    compared = 0
    for request, seen, bases in fast_steps():
        first, stop = min(SINK, LENGTHS[request]), seen.tokens - RECENT
        for head in range(H):
            read = [*seen.packed[head], *range(max(first, stop), seen.tokens)]
            weights_GS = seen.logits_HGT[head][:, read].exp()
            value_HTE = seen.value_HTE[head].double()
            total_G, out_GE = weights_GS.sum(-1), weights_GS @ value_HTE[read]
            if stop - first > BUDGET:
                unread = [j for j in range(first, stop) if j not in seen.packed[head]]
                rest_G = REST * estimate(seen, *bases, head)[:, unread].exp().sum(-1)
                total_G, compared = total_G + rest_G, compared + 1
                out_GE = out_GE + rest_G[:, None] * value_HTE[first:stop].mean(0)
            expected_GE = out_GE / total_G[:, None]
            got_GE = seen.out_HGE[head].double()
            torch.testing.assert_close(got_GE, expected_GE, rtol=1e-4, atol=1e-4)
    assert compared > 100


def test_the_basis_is_the_prompts_own():
    """Learned from all cached keys but the sinks, at the prompt's end with its last queries."""
    watch, learned = run()
    assert len(learned) == sum(len(bases_of(seen)) for seen in watch.seen.values())
    for (request, _), seen in watch.seen.items():
        learned_at = [tokens for _, tokens, _ in bases_of(seen)]
        if LENGTHS[request] > SINK + RECENT:
            assert learned_at == [LENGTHS[request]]
        elif LENGTHS[request] + NEW - 1 > SINK + RECENT + BUDGET:  # when a step first has to choose
            assert learned_at == [SINK + RECENT + BUDGET]  # from what was there before it
        else:
            assert learned_at == []
    assert {layer for _, layer in watch.seen} == {*LAYERS}


def test_the_basis_is_learned_again_from_the_last_queries():
    """Every third token, from the queries of the prompt's end and of the steps since."""
    for layer in LAYERS:
        seen = run(3)[0].seen[0, layer]
        bases = bases_of(seen, 3)
        prompt = bases[0][2]  # [H, tokens * G, D]
        G = prompt.shape[1] // LENGTHS[0]
        assert [tokens for _, tokens, _ in bases] == list(range(LENGTHS[0], LENGTHS[0] + NEW - 1, 3))
        for _, tokens, query_HND in bases[1:]:
            steps = [step.query_HGD for step in seen[1:] if step.tokens <= tokens]
            expected = torch.cat([prompt, *steps], 1)
            assert expected.shape[1] == tokens * G
            own_HDD, expected_HDD = (part.mT @ part for part in (query_HND, expected))
            torch.testing.assert_close(own_HDD, expected_HDD)


def test_what_choosing_reads_is_a_word_a_token_and_the_projections():
    report, D = run()[0].report.requests[0], run()[0].seen[0, 0][0].query_HGD.shape[-1]
    steps = range(1, NEW)
    context = [LENGTHS[0] + step for step in steps]
    choosing = sum(tokens / D + 16 + tokens / 256 + 1 for tokens in context)
    assert report.selection_ratio == pytest.approx(choosing / sum(context))
    assert run()[0].report.requests[2].selection_ratio == 0


@pytest.mark.parametrize("D", [40, 72])
def test_no_basis_of_as_many_channels_keeps_more_of_the_products(D: int):
    """Eckart and Young: over all pairs of the queries and keys at hand."""
    torch.manual_seed(0)
    N, T = 300, 500
    mixing = torch.randn(2, 2, D, D)
    query_HND = torch.randn(2, N, D) @ mixing[0] + 0.5
    key_HTD = torch.randn(2, T, D) @ mixing[1] + 2.0
    basis = learn_basis(key_HTD, query_HND)
    for head in range(2):
        centered = (key_HTD[head] - key_HTD[head].mean(0)).double()
        products = query_HND[head].double() @ centered.T
        ours = (query_HND[head] @ basis.query_HDC[head]).double() @ (basis.encode_HDC[head].double().T @ centered.T)
        share = 1 - (products - ours).square().sum() / products.square().sum()
        singular = torch.linalg.svdvals(products)
        most = singular[: 16 * words(D)].square().sum() / singular.square().sum()
        assert 0.97 * most < share < most * (1 + 1e-6)
        energy = own_energy(query_HND[head], basis, centered, head)
        assert energy == sorted(energy, reverse=True)


def own_energy(query_ND: torch.Tensor, basis: CodeBasis, centered_TD: torch.Tensor, head: int) -> list[float]:
    by_query = (query_ND @ basis.query_HDC[head]).double().square().mean(0)
    by_key = (centered_TD @ basis.encode_HDC[head].double()).square().mean(0)
    return [round(value, 2) for value in (by_query * by_key).tolist()]


def test_fewer_dimensions_than_channels_lose_nothing_but_levels():
    key_HTD, query_HND = torch.randn(1, 50, 8), torch.randn(1, 50, 8)
    basis = learn_basis(key_HTD, query_HND)
    ours = (query_HND @ basis.query_HDC) @ ((key_HTD - basis.mean_HD[:, None]) @ basis.encode_HDC).mT
    true = query_HND @ (key_HTD - key_HTD.mean(1, keepdim=True)).mT
    torch.testing.assert_close(ours, true, rtol=1e-3, atol=1e-3)


def test_what_an_observer_hears_of_the_scores():
    """The estimated attention on unread keys, and the last score chosen over the first one left."""
    logits_HGT, index_HK = torch.randn(2, 3, 9), torch.tensor([[0, 4, 7], [1, 2, 3]], dtype=torch.int32)
    diagnostics = diagnosed(logits_HGT, index_HK)
    for head, chosen in enumerate(index_HK.tolist()):
        score = [sum(float(p[j]) for p in logits_HGT[head].softmax(-1)) / 3 for j in range(9)]
        left = [score[j] for j in range(9) if j not in chosen]
        assert float(diagnostics["unread_estimate"][head]) == pytest.approx(sum(left), rel=1e-4)
        assert float(diagnostics["score_margin"][head]) == pytest.approx(
            min(score[j] for j in chosen) / max(left), rel=1e-4
        )


def test_an_observer_hears_of_every_choice_and_changes_none():
    model, rows, heard = tiny("llama"), [prompt_of(length) for length in LENGTHS], RecordingObserver()
    options = {"policy": "codescan", "max_new_tokens": NEW, "stop_token_ids": ()}
    alone = generate(model, None, rows, CONFIG, **options)
    watched = generate(model, None, rows, CONFIG, observers=[heard], **options)
    assert [r.token_ids for r in watched.report.requests] == [r.token_ids for r in alone.report.requests]
    chose = [event for event in heard.selections if (event.index_HK >= 0).sum(1).max() == BUDGET]
    assert len(chose) > 20
    for event in (event for event in heard.selections if event.step):
        unread_H, margin_H = event.diagnostics["unread_estimate"], event.diagnostics["score_margin"]
        assert ((unread_H >= 0) & (unread_H < 1)).all()
        # scores are compared in steps of an eighth, so that one left may be that much higher
        assert (margin_H.isnan() | (margin_H > 0.85)).all()
    assert any(event.diagnostics["unread_estimate"].max() > 0 for event in chose)


def test_a_run_of_sfi_says_what_codescan_would_read():
    model = tiny("qwen3")
    limits = [
        generate(model, None, [prompt_of(300)], CONFIG, policy=policy, max_new_tokens=NEW).byte_limit
        for policy in ("sfi", "codescan")
    ]
    assert limits[0].codescan_read_ratio == pytest.approx(limits[1].read_ratio, abs=0.005)
    assert limits[1].codescan_read_ratio is None
    engine = EngineOptions(lossless=True)
    exact = generate(model, None, [prompt_of(300)], CONFIG, policy="sfi", engine=engine, max_new_tokens=NEW)
    assert exact.byte_limit.codescan_read_ratio is None  # its tokens are full attention's already
