"""The Selector's kernels against its reference in float64."""

import math
from collections import Counter

import pytest
import torch

from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.launch import KernelLimitError, counting
from sfi_kernels.selector import selector

kernels = pytest.importorskip("sfi_kernels.selector.triton")

DEFAULTS = {
    "alpha": 0.5, "gamma": 0.5, "beta": 0.57, "power": 1.8, "eta": 0.4, "lambda_clip": 0.5,
    "alpha_soft": 0.5, "radius": 3, "alpha_cross": 0.35, "temperature": 2.0,
}  # fmt: skip
ROUNDING = torch.finfo(torch.float32).eps
INF = float("inf")


@pytest.fixture
def run(kernel_device, monkeypatch):
    """Run the kernels on CPU tensors; what they do not write is NaN."""
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **k: allocate(*size, **k).fill_(torch.nan))

    def run(logits, norm, allowed, **changes):
        settings = DEFAULTS | changes
        for name, value in settings.items():
            if isinstance(value, torch.Tensor):
                settings[name] = value.to(kernel_device)
        inputs = [tensor.to(kernel_device) for tensor in (logits, norm, allowed)]
        score, weight = selector.triton(*inputs, **settings)
        return score.cpu(), weight.cpu()

    return run


@pytest.fixture
def small_chunks(monkeypatch):
    """Rows of 33 to 64 positions have two chunks, which are merged at once; longer ones have more."""
    monkeypatch.setattr(kernels, "BLOCK", 32)
    monkeypatch.setattr(kernels, "CHUNKS", 2)
    monkeypatch.setattr(kernels, "TILE", 64)


def inputs(B, H, G, W, T, scale=3.0):
    """Random logits, norms and a candidate set with holes, after sinks and before a ragged end."""
    allowed = torch.rand(B, T) < 0.9
    for b in range(B):
        allowed[b, : T // 20] = False
        allowed[b, T - b * T // 3 :] = False
    return scale * torch.randn(B, H, G, W, T), torch.rand(B, H, T) * 20 + 1, allowed


def relative_error(logits, norm, allowed, c):
    """Bound how far a float32 f or r is from the exact one, as a fraction of it.

    f: three roundings of a logit less its log-sum-exp in the exponent, eight of the terms and of the mean,
    which 1 / alpha magnifies, and twice the size of a power of two, at most 50 where f matters beside eps.
    r: twice the size of each factor's exponent, and eight. Normalizing by a weighted sum doubles both.
    """
    inside = allowed[:, None].expand_as(norm)
    seen = logits.double()[allowed[:, None, None, None].expand_as(logits)]
    seen = seen[seen > -INF]
    spread = 2 * float(seen.abs().max()) + math.log(logits.shape[-1]) if len(seen) else 0.0
    f = 3 * spread + 8 / c["alpha"] + 2 * 50
    length = float((norm[inside].double() + EPS).log2().abs().max()) if inside.any() else 0.0
    r = 2 * (c["gamma"] * length + c["eta"] * 27 + c["beta"]) + 8
    return 2 * ROUNDING * max(f, r)


def check(run, logits, norm, allowed, **changes):
    """Compare with the reference in float64, within bounds derived from its own numbers."""
    c = DEFAULTS | changes
    got_facts, facts = {}, {}
    score, weight = run(logits, norm, allowed, **changes, diagnostics=got_facts)
    exact, exact_weight = selector.reference(logits.double(), norm.double(), allowed, **c, diagnostics=facts)
    assert score.dtype == weight.dtype == torch.float32
    assert exact.dtype == torch.float64
    assert score.isfinite().all()
    outside = ~allowed[:, None].expand_as(score)
    assert (score[outside] <= MASKED_SCORE).all()
    assert (score[~outside] > MASKED_SCORE / 2).all()

    error = relative_error(logits, norm, allowed, c)
    ff, fr, rr, entropy = (value.double() for value in facts.values())
    distance = (ff - 2 * fr + rr).clamp_min(1e-30)
    # Eq. 17's numerator and denominator are off by so much; the quotient by the sum of both
    weight_error = 2 * error * (ff + fr + exact_weight * (ff + 2 * fr + rr)) / distance
    off = (weight - exact_weight).abs()
    assert (off <= weight_error + ROUNDING).all()

    # a weight that is off moves the score of a position where f or r alone counts
    spare = torch.minimum(exact_weight, 1 - exact_weight)
    moved = torch.where(off > 0, off / spare.clamp_min(1e-30), 0.0)
    z_error = error + float(moved.max()) + 8 * ROUNDING * 40
    rivals = 1 + 2 * c["alpha_cross"] / c["temperature"]
    score_error = z_error * (1 + 2 * c["alpha_soft"]) * rivals
    assert score_error < 0.01  # else the comparison says nothing
    torch.testing.assert_close(score[~outside].double(), exact[~outside], rtol=0, atol=score_error)
    assert got_facts.keys() == facts.keys()
    for (name, fact), want in zip(got_facts.items(), (ff, fr, rr, entropy), strict=True):
        close = {"rtol": 4 * error, "atol": 4 * error if name == "evidence_entropy" else 0.0}
        torch.testing.assert_close(fact.cpu().double(), want, **close)
    return score, weight


@pytest.mark.parametrize(
    ("T", "heads"), [(1, (2, 1, 1)), (63, (8, 4, 1)), (64, (3, 2, 3)), (65, (1, 1, 16)), (600, (2, 4, 1))]
)
def test_kernel_equals_the_reference(run, T, heads):
    check(run, *inputs(1, *heads, T), radius=16)


@pytest.mark.parametrize(("B", "T"), [(2, 33), (1, 97), (1, 300)])
def test_kernel_equals_the_reference_over_several_chunks(run, small_chunks, B, T):
    check(run, *inputs(B, 2, 2, 2 if T < 129 else 1, T))


@pytest.mark.parametrize(("T", "span"), [(5, 3), (70, 10), (100, 40)])
def test_pooled_logits(run, small_chunks, T, span):
    """Positions outside J neither give nor receive, at the ends of a block as elsewhere."""
    check(run, *inputs(1, 2, 2, 1, T), span=span)


def longer(logits, norm, allowed, T):
    """Give rows room for T positions: what a graph's have, whose rows are as long as the cache."""
    B, H, G, W, old = logits.shape
    rows = logits.new_full((B, H, G, W, T), torch.nan), norm.new_full((B, H, T), torch.nan)
    for room, tensor in zip(rows, (logits, norm), strict=True):
        room[..., :old] = tensor
    return *rows, torch.nn.functional.pad(allowed, (0, T - old))


def test_room_behind_the_longest_request_changes_no_bit(run, small_chunks):
    """More positions than two chunks of 32 hold, and room for twice as many."""
    operands = inputs(1, 2, 2, 1, 128)
    score, weight = run(*operands)
    padded, same = run(*longer(*operands, 300))
    assert torch.equal(padded[..., :128], score)
    assert torch.equal(same, weight)


@pytest.mark.parametrize(
    "changes",
    [
        {"radius": 0},
        {"radius": 70},
        {"alpha_soft": 0.0},
        {"alpha": 0.25},
        {"alpha": 1.0},
        {"beta": 0.0, "eta": 0.0, "lambda_clip": 1.0},
        {"lambda_clip": 0.0},
        {"lambda_clip": 1, "gamma": 2, "beta": 3, "power": 1, "eta": 1},
        {"temperature": 0.1, "alpha_cross": 0.85},
    ],
    ids=str,
)
def test_settings(run, small_chunks, changes):
    check(run, *inputs(1, 3, 1, 1, 70), **changes)


def test_spiky_logits(run, small_chunks):
    """f of 1 at one position and below 1e-60 at others."""
    logits, norm, allowed = inputs(1, 1, 2, 2, 70)
    logits = torch.where(torch.rand_like(logits) < 0.1, 80.0, -80.0)
    check(run, logits, norm, allowed)


def test_a_lone_spike_in_the_oldest_block_of_a_chunk(run, small_chunks):
    """Relative to any smaller peak, 1 / alpha would take it out of float32."""
    logits = torch.full((1, 1, 1, 1, 70), -80.0)
    logits[..., 3] = 80.0
    check(run, logits, torch.ones(1, 1, 70), torch.ones(1, 70) > 0, alpha=0.25)


def test_low_precision_logits_and_norms(run):
    logits, norm, allowed = inputs(1, 2, 2, 1, 65)
    check(run, logits.half(), norm.half(), allowed)


def test_a_single_candidate(run, small_chunks):
    logits, norm, allowed = inputs(1, 2, 2, 1, 100)
    allowed[0] = torch.arange(100) == 70
    check(run, logits, norm, allowed)


def test_a_request_without_candidates_beside_one_that_has_some(run, small_chunks):
    logits, norm, allowed = inputs(2, 2, 1, 1, 70)
    allowed[0] = False
    check(run, logits, norm, allowed)
    check(run, logits, norm, allowed, span=3)


def test_queries_that_see_nothing_of_the_candidates(run, small_chunks):
    """One of several, then all of a head; a window's older queries see less."""
    logits, norm, allowed = inputs(1, 3, 2, 2, 70)
    logits[0, 0, 1, 0] = -INF
    logits[0, :, :, 0, 60:] = -INF
    logits[0, 1] = -INF
    check(run, logits, norm, allowed)


def test_equal_candidates_have_equal_scores(run, small_chunks):
    """Ties are what Eq. 24's rule is for; noise must not break them."""
    _, _, allowed = inputs(2, 2, 1, 1, 100)
    ones = torch.ones(2, 2, 100)
    score, weight = run(0.3 * torch.ones(2, 2, 1, 1, 100), ones, allowed, beta=0.0, eta=0.0)
    for b in range(2):
        assert len(score[b, :, allowed[b]].unique()) == 1
    assert (weight == 0).all()  # Eq. 18 where f = r, both uniform


def test_evidence_equal_to_the_prior_up_to_rounding_has_weight_zero(run, small_chunks):
    """Eq. 18 where f = r, neither uniform: the logits are the logarithm of the prior."""
    norm = torch.rand(1, 2, 100, dtype=torch.float64) * 3 + 1
    logits = (-0.5 * norm.log()).float()[:, :, None, None]
    flat = {"beta": 0.0, "eta": 0.0, "lambda_clip": 1.0}
    everywhere = torch.ones(1, 100, dtype=torch.bool)
    _, weight = run(logits, norm.float(), everywhere, **flat)
    assert (weight == 0).all()
    # a thousandth away is far above the rounding
    logits[..., ::2] += 1e-3
    check(run, logits, norm.float(), everywhere, **flat)


@pytest.mark.parametrize(("gamma", "scale"), [(0.5, 1), (5.0, 1), (5.0, 1e10)])
def test_a_key_of_norm_zero_takes_the_whole_prior(run, small_chunks, gamma, scale):
    """Eq. 9 leaves float32 from gamma = 5 on, and stops at its largest number; long keys' are below it."""
    logits, norm, allowed = inputs(1, 2, 1, 1, 100)
    allowed[:] = True
    norm[..., 40] = 0.0
    norm[..., 41] = 2e-8
    check(run, logits, scale * norm, allowed, gamma=gamma)


def test_padded_and_strided_inputs(run, kernel_device, small_chunks):
    """The attention kernel's logits, the cache's key norms, one mask for all requests."""
    logits, norm, allowed = inputs(2, 2, 2, 2, 40)
    together, weight = run(logits, norm, allowed[:1].repeat(2, 1))
    padded = torch.full((2, 2, 2, 2, 64), torch.nan, device=kernel_device)
    padded = padded.permute(1, 0, 3, 2, 4)[..., :40]
    padded.copy_(logits)
    longer = torch.full((2, 3, 60), torch.nan, device=kernel_device)[:, 1:, 10:50]
    longer.copy_(norm)
    mask = allowed[:1].to(kernel_device).expand(2, 40)
    score, same = selector.triton(padded, longer, mask, **DEFAULTS)
    assert torch.equal(score.cpu(), together)
    assert torch.equal(same.cpu(), weight)


def test_the_log_sum_of_the_attention_kernel_saves_two_launches(run, small_chunks):
    logits, norm, allowed = inputs(1, 2, 2, 2, 70)
    logits[0, 1, 0, 1] = -INF
    log_sum = logits.masked_fill(~allowed[:, None, None, None], -INF).logsumexp(-1)
    counter = Counter()
    with counting(counter):
        given, weight = check(run, logits, norm, allowed, log_sum_BHGW=log_sum)
    names = ("mean", "sum", "weigh", "score", "refine")
    assert counter == {f"selector_{name}": 1 for name in names}
    score, same = run(logits, norm, allowed)
    # a log-sum-exp of about 10 rounds to 8 units, and its rounding weighs a query against the others
    torch.testing.assert_close(given, score, rtol=0, atol=64 * ROUNDING)
    torch.testing.assert_close(weight, same, rtol=64 * ROUNDING, atol=0)


def test_a_given_log_sum_is_used_as_it_is(run):
    logits, norm, allowed = inputs(1, 2, 2, 2, 70)
    log_sum = torch.randn(1, 2, 2, 2)
    check(run, logits, norm, allowed, log_sum_BHGW=log_sum)
    poison = torch.full_like(log_sum, torch.nan)
    pooled, _ = run(logits, norm, allowed, span=2, log_sum_BHGW=poison)
    assert torch.equal(pooled, run(logits, norm, allowed, span=2)[0])


def test_nothing_is_launched_for_no_requests(run):
    score, weight = run(torch.zeros(0, 2, 1, 1, 5), torch.zeros(0, 2, 5), torch.zeros(0, 5) > 0)
    assert (score.shape, weight.shape) == ((0, 2, 5), (0, 2))


def test_what_the_kernel_cannot_take_is_refused(run):
    logits, norm, allowed = inputs(1, 2, 2, 2, 40)
    with pytest.raises(KernelLimitError, match=r"^logits must be float32, .*use the torch backend$"):
        run(logits.double(), norm, allowed)
    with pytest.raises(KernelLimitError, match=r"^key_norm must be float32, "):
        run(logits, norm.double(), allowed)
    with pytest.raises(ValueError, match=r"^logits must be contiguous along T, got strides"):
        run(logits.mT.contiguous().mT, norm, allowed)
    with pytest.raises(ValueError, match=r"^allowed must be bool, got torch.int64$"):
        run(logits, norm, allowed.long())
    with pytest.raises(ValueError, match=r"^log_sum must be contiguous, got strides \(8, 4, 1, 2\)$"):
        run(logits, norm, allowed, log_sum_BHGW=torch.zeros(1, 2, 2, 2).mT)


@pytest.mark.parametrize("span", [0, 3])
def test_what_stands_outside_the_candidates_is_never_used(run, span):
    """Attention leaves logits, and the cache norms, undefined beyond a shorter request's tokens."""
    logits, norm, allowed = inputs(2, 2, 2, 1, 130)
    expected = run(logits, norm, allowed, span=span)
    logits = logits.masked_fill(~allowed[:, None, None, None], torch.nan)
    result = run(logits, norm.masked_fill(~allowed[:, None], torch.nan), allowed, span=span)
    assert all(torch.equal(*pair) for pair in zip(result[:2], expected[:2], strict=True))


def test_an_interval_stands_for_its_mask(run):
    logits, norm, _ = inputs(2, 2, 2, 1, 70)
    inside = torch.zeros(2, 70, dtype=torch.bool)
    inside[:, 4:61] = True
    score, weight = run(logits, norm, ~inside, interval=(4, 61))
    expected, expected_weight = run(logits, norm, inside)
    assert torch.equal(score, expected)
    assert torch.equal(weight, expected_weight)
