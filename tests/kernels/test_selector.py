"""Algorithm 2 as a whole: what the paper states, the edges, a slow oracle, and heads in several processes."""

import math
from collections.abc import Callable

import pytest
import torch

from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.selector import exclude_across_heads, selector

B, H, G, W, T = 2, 3, 2, 4, 50
DEFAULTS = {
    "alpha": 0.5, "gamma": 0.5, "beta": 0.57, "power": 1.8, "eta": 0.4, "lambda_clip": 0.02,
    "alpha_soft": 0.5, "radius": 2, "alpha_cross": 0.35, "temperature": 2.0,
}  # fmt: skip
INF = float("inf")


@pytest.fixture
def allowed() -> torch.Tensor:
    mask_BT = torch.ones(B, T, dtype=torch.bool)
    mask_BT[:, :4] = False
    mask_BT[0, -10:] = False
    mask_BT[1, -21:] = False
    return mask_BT


def run(allowed_BT, logits=None, **changes):
    B, T = allowed_BT.shape
    logits = 3 * torch.randn(B, H, G, W, T) if logits is None else logits
    norm = torch.rand(*logits.shape[:2], T) + 1
    return selector(logits, norm, allowed_BT, **(DEFAULTS | changes))


def oracle(logits, norm, allowed, c):
    """Algorithm 2 for one request, in float64 loops straight from the paper: z_adj[h][j] for j in J, and lambda*[h]."""
    J = [j for j, inside in enumerate(allowed) if inside]
    z, weights = [], []
    for logits_h, norm_h in zip(logits, norm, strict=True):
        pools = [pooled(J, row, c["span"]) for group in logits_h for row in group]  # all G * W rows alike
        rows = [normal({j: math.exp(pool[j]) for j in J}) for pool in pools]  # Eq. 6
        mu = {j: sum(row[j] ** c["alpha"] for row in rows) / len(rows) for j in J}  # Eq. 7
        f = normal({j: mu[j] ** (1 / c["alpha"]) for j in J})  # Eq. 8
        r = {}
        for j in J:
            # Eq. 10; its eps is lost beside the length in float32, where the last u is 1
            u = torch.tensor((j - J[0]) / (J[-1] - J[0] + EPS), dtype=torch.float32).item()
            place = math.exp(-c["beta"] * u ** c["power"]) * (1 - u + EPS) ** c["eta"]  # Eq. 11
            r[j] = (norm_h[j] + EPS) ** -c["gamma"] * place  # Eqs. 9, 12
        r = normal(r)
        ff, fr, rr = (sum(a[j] * b[j] for j in J) for a, b in ((f, f), (f, r), (r, r)))
        weight = min(max((ff - fr) / (ff - 2 * fr + rr), 0.0), c["lambda_clip"])  # Eq. 18
        score = {j: math.log((1 - weight) * f[j] + weight * r[j] + EPS) for j in J}  # Eqs. 15, 19
        peak = {j: max(score[i] for i in J if abs(i - j) <= c["radius"]) for j in J}  # Eq. 20
        z.append({j: score[j] - c["alpha_soft"] * max(peak[j] - score[j], 0.0) for j in J})
        weights.append(weight)
    share = {j: normal({h: math.exp(z[h][j] / c["temperature"]) for h in range(len(z))}) for j in J}
    adjusted = [
        {j: z[h][j] + c["alpha_cross"] * math.log(max(share[j][h], EPS)) for j in J}  # Eqs. 22-23
        for h in range(len(z))
    ]
    return adjusted, weights


def pooled(J, row, span):
    return {j: max(row[i] for i in J if abs(i - j) <= span) for j in J}


def normal(weight):
    total = sum(weight.values())
    return {key: value / total for key, value in weight.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lambda_clip": 1.0, "alpha_soft": 1.0, "alpha_cross": 0.85, "radius": 16},
        {"alpha": 0.2, "gamma": 2.0, "beta": 3.0, "eta": 1.0, "temperature": 0.5},
        {"lambda_clip": 0.5, "span": 2},
    ],
    ids=["default", "released", "sharp", "span"],
)
def test_selector_equals_the_paper_in_slow_loops(allowed, changes):
    """Algorithm 2 on a ragged batch, W = 4, G = 2, H = 3."""
    logits, norm = 3 * torch.randn(B, H, G, W, T), torch.rand(B, H, T) + 1
    allowed[1, 10:13] = False  # J need not be contiguous
    score, weight = selector(logits, norm, allowed, **(DEFAULTS | changes))
    constants = DEFAULTS | {"span": 0} | changes
    for b in range(B):
        z, weights = oracle(logits[b].tolist(), norm[b].tolist(), allowed[b].tolist(), constants)
        expected = torch.tensor([[*row.values()] for row in z])
        torch.testing.assert_close(score[b][:, allowed[b]], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weight[b], torch.tensor(weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"span": 2}, {"alpha": 0.2, "gamma": 4.0, "radius": 40}, {"alpha": 1.0, "lambda_clip": 1.0, "temperature": 0.1},
        {"alpha_cross": 0.0, "radius": 0},
    ],
)  # fmt: skip
def test_compiled_loops_score_an_interval_as_float64_does(changes):
    """Beside a query that sees nothing, one that sees a part, and a key of norm 0; with all diagnostics."""
    pytest.importorskip("numba")
    logits, norm, diagnostics, wanted = 3 * torch.randn(B, H, G, W, T), 5 * torch.rand(B, H, T), {}, {}
    logits[0, 0, 0, 0], logits[:, :, :, 1, 30:], norm[0, 0, 10] = -INF, -INF, 0
    constants = DEFAULTS | {"interval": (4, 45)} | changes
    score, weight = selector.numba(logits, norm, None, diagnostics=diagnostics, **constants)
    expected, weights = selector.reference(logits.double(), norm.double(), None, diagnostics=wanted, **constants)
    torch.testing.assert_close(score[..., 4:45].double(), expected[..., 4:45], rtol=1e-5, atol=1e-5)
    assert (score[..., :4] == MASKED_SCORE).all()
    assert (score[..., 45:] == MASKED_SCORE).all()
    torch.testing.assert_close(weight.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(diagnostics, wanted, rtol=1e-5, atol=1e-5)
    sums = logits[..., 4:45].logsumexp(-1)
    again, _ = selector.numba(logits, norm, None, log_sum_BHGW=sums, **constants)
    torch.testing.assert_close(again, score)


def test_nothing_outside_the_allowed_set_can_win(allowed):
    """Eq. 24 ranks positions of J only."""
    score, weight = run(allowed)
    outside = ~allowed[:, None].expand_as(score)
    assert score.isfinite().all()
    assert (score[outside] <= MASKED_SCORE).all()
    assert score[~outside].min() > MASKED_SCORE / 2
    assert ((weight >= 0) & (weight <= DEFAULTS["lambda_clip"])).all()


def test_a_request_without_candidates_scores_nothing_beside_one_that_has_some(allowed):
    allowed[0] = False
    score, weight = run(allowed)
    assert score.isfinite().all()
    assert (score[0] <= MASKED_SCORE / 2).all()
    assert (weight[0] == 0).all()
    assert (score[1][:, allowed[1]] > MASKED_SCORE / 2).all()


def test_what_lies_outside_the_allowed_set_does_not_matter(allowed):
    """A ragged batch holds garbage there."""
    logits, norm = torch.randn(B, H, G, W, T), torch.rand(B, H, T) + 1
    expected = selector(logits, norm, allowed, **DEFAULTS)
    outside = ~allowed[:, None]
    dirty_logits = logits.masked_fill(~allowed[:, None, None, None], float("nan"))
    actual = selector(dirty_logits, norm.masked_fill(outside, float("nan")), allowed, **DEFAULTS)
    torch.testing.assert_close(actual, expected)


def test_a_head_that_sees_nothing_ranks_its_candidates_alike(allowed):
    """No evidence: every candidate has one finite score, and nothing else is affected."""
    logits = torch.randn(B, H, G, W, T)
    logits[0, 1] = -INF
    score, weight = run(allowed, logits, alpha_cross=0.0)
    candidates = score[0, 1, allowed[0]]
    assert (candidates == candidates[0]).all()
    assert candidates[0] > MASKED_SCORE / 2
    assert score.isfinite().all()
    assert weight[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_huge_logits_give_finite_scores(allowed, dtype):
    logits = (1e4 * torch.randn(B, H, G, W, T)).to(dtype)
    logits[..., 30] = -INF
    score, weight = run(allowed, logits, alpha=0.1)
    assert score.dtype == weight.dtype == torch.float32
    assert score.isfinite().all()
    assert weight.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("span", [0, 3])
def test_half_precision_inputs_are_computed_in_float32(allowed, dtype, span):
    logits, norm = torch.randn(B, H, G, W, T).to(dtype), torch.rand(B, H, T).to(dtype)
    actual = selector(logits, norm, allowed, **DEFAULTS, span=span)
    expected = selector(logits.float(), norm.float(), allowed, **DEFAULTS, span=span)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("inside", [True, False])
def test_a_cache_of_one_token_works(inside):
    score, weight = run(torch.tensor([[inside]]), radius=16, span=16)
    assert ((score > MASKED_SCORE / 2) == inside).all()
    assert score.isfinite().all()
    assert (weight == 0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, r"^alpha must be in \(0, 1\], got 0.0$"),
        ({"lambda_clip": 1.5}, r"^lambda_clip must be in \[0, 1\], got 1.5$"),
        ({"temperature": 0.0}, "^temperature must be positive, got 0.0$"),
        ({"span": -1}, "^span must be at least 0, got -1$"),
        ({"radius": -1}, "^radius must be at least 0, got -1$"),
        ({"interval": (4, 51)}, r"^interval must hold positions in \[0, 50\), got \(4, 51\)$"),
        ({"interval": (4, 4)}, r"^interval must hold positions in \[0, 50\), got \(4, 4\)$"),
    ],
)
def test_an_argument_out_of_range_is_named(backend, allowed, changes, message):
    logits, norm = torch.randn(B, H, G, W, T), torch.rand(B, H, T)
    with pytest.raises(ValueError, match=message):
        selector.on(backend)(logits, norm, allowed, **(DEFAULTS | changes))


def test_a_mask_that_is_not_boolean_is_refused(allowed):
    with pytest.raises(ValueError, match=r"^allowed must be bool, got torch.int64$"):
        run(allowed.long())


def test_a_mask_of_another_length_is_refused(allowed):
    with pytest.raises(ValueError, match=r"^key_norm must be \[B=2, H=3, T=50\], got \[2, 3, 49\]"):
        run(allowed[:, :-1], torch.randn(B, H, G, W, T))


def test_a_log_sum_at_hand_weighs_its_query(allowed):
    """It is used, not made again: queries that are all off alike change nothing, one that is does."""
    logits, norm = torch.randn(B, H, G, W, T), torch.rand(B, H, T) + 1
    logits[0, 1, 0, 2] = -INF  # sees nothing of J, and its log-sum-exp is -inf
    log_sum = logits.masked_fill(~allowed[:, None, None, None], -INF).logsumexp(-1)
    expected, weight = selector(logits, norm, allowed, **DEFAULTS)
    given = selector(logits, norm, allowed, **DEFAULTS, log_sum_BHGW=log_sum)
    torch.testing.assert_close(given, (expected, weight))
    alike, _ = selector(logits, norm, allowed, **DEFAULTS, log_sum_BHGW=log_sum + 5)
    torch.testing.assert_close(alike, expected)
    log_sum[:, :, 0, 0] += 5
    other, _ = selector(logits, norm, allowed, **DEFAULTS, log_sum_BHGW=log_sum)
    assert not torch.allclose(other, expected, rtol=1e-3)


def test_pooled_logits_have_another_log_sum(allowed):
    logits, norm = torch.randn(B, H, G, W, T), torch.rand(B, H, T) + 1
    poison = torch.full((B, H, G, W), torch.nan)
    actual = selector(logits, norm, allowed, **DEFAULTS, span=2, log_sum_BHGW=poison)
    torch.testing.assert_close(actual, selector(logits, norm, allowed, **DEFAULTS, span=2))


def test_diagnostics_say_what_the_prior_was_weighed_by(allowed):
    """One query and a flat prior: f is the softmax on J, r is 1 / |J|."""
    logits = torch.randn(B, H, 1, 1, T)
    allowed[1] = False
    facts = {"other": torch.ones(1)}
    flat = {"gamma": 0.0, "beta": 0.0, "eta": 0.0}
    run(allowed, logits, **flat, diagnostics=facts)
    f = logits[0, :, 0, 0, allowed[0]].double().softmax(-1)
    share = torch.full((H,), 1 / int(allowed[0].sum()), dtype=torch.float64)
    expected = {
        "evidence_norm2": f.square().sum(-1),
        "evidence_dot_prior": share,
        "prior_norm2": share,
        "evidence_entropy": torch.distributions.Categorical(f).entropy(),
    }
    assert facts.keys() == {"other", *expected}
    for name, value in expected.items():
        assert facts[name].dtype == torch.float32
        torch.testing.assert_close(facts[name][0], value.float())
        assert (facts[name][1] == 0).all()  # nothing is allowed


def test_float64_inputs_are_computed_in_float64(allowed):
    logits, norm = torch.randn(B, H, G, W, T).double(), torch.rand(B, H, T).double() + 1
    score, weight = selector(logits, norm, allowed, **DEFAULTS)
    assert score.dtype == weight.dtype == torch.float64
    nudged, _ = selector(logits + 1e-12 * torch.randn_like(logits), norm, allowed, **DEFAULTS)
    assert 0 < (nudged - score)[allowed[:, None].expand_as(score)].abs().max() < 1e-10


@pytest.mark.parametrize(
    ("log_sum", "message"),
    [
        (torch.zeros(B, H, G), r"^log_sum must be \[B=2, H=3, G=2, W=4\], got \[2, 3, 2\]$"),
        (torch.zeros(B, H, G, W).double(), r"^log_sum must be float32, got torch.float64$"),
    ],
)
def test_a_log_sum_that_does_not_fit_is_refused(allowed, log_sum, message):
    with pytest.raises(ValueError, match=message):
        run(allowed, torch.randn(B, H, G, W, T), log_sum_BHGW=log_sum)


@pytest.mark.parametrize("span", [0, 3])
@pytest.mark.parametrize("window", [1, W])
def test_a_request_seen_on_its_candidates_alone_scores_the_same(window: int, span: int):
    """What lies beyond J changes nothing, so J may be cut out; a query may be blind to all of it."""
    first, stop = 4, 41
    allowed = torch.zeros(1, T, dtype=torch.bool)
    allowed[:, first:stop] = True
    logits, norm = 3 * torch.randn(1, H, G, window, T), torch.rand(1, H, T) + 1
    logits[0, 1, 0, 0, first:stop] = -INF
    whole, weight = selector(logits, norm, allowed, span=span, **DEFAULTS)
    cut, cut_weight = selector(logits[..., first:stop], norm[..., first:stop], None, span=span, **DEFAULTS)
    assert torch.allclose(cut, whole[..., first:stop], atol=1e-5)
    assert torch.allclose(cut_weight, weight, atol=1e-6)
    score, told_weight = selector(logits, norm, ~allowed, span=span, interval=(first, stop), **DEFAULTS)
    assert torch.equal(score[..., first:stop], cut)
    assert (score.masked_fill(allowed, MASKED_SCORE) == MASKED_SCORE).all()
    assert torch.equal(told_weight, cut_weight)


SETTINGS = {
    "alpha": 0.5, "gamma": 0.5, "beta": 0.5, "power": 1.8, "eta": 0.4, "lambda_clip": 0.02,
    "alpha_soft": 0.5, "radius": 16, "alpha_cross": 0.35, "temperature": 2.0,
}  # fmt: skip
Gather = Callable[[torch.Tensor], torch.Tensor]


def apart(parts: int, run: Callable[[int, Gather], torch.Tensor]) -> torch.Tensor:
    """Run every part of the heads with a gather that answers as the others would; join the results."""
    gathered: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor)
        return tensor[None]

    for part in range(parts):
        run(part, note)
    assert len(gathered) == parts  # one call each, whatever the heads
    return torch.cat([run(part, lambda _: torch.stack(gathered[:parts])) for part in range(parts)], 1)


@pytest.mark.parametrize("temperature", [2.0, 0.1, 1e-6])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_heads_apart_compete_as_heads_together(parts, temperature):
    score_BHT = torch.randn(2, 4, 50) * 5
    score_BHT[1, :, 30:] = MASKED_SCORE
    whole = exclude_across_heads(score_BHT, 0.35, temperature)
    pieces = score_BHT.chunk(parts, 1)
    split = apart(parts, lambda p, gather: exclude_across_heads(pieces[p], 0.35, temperature, gather))
    torch.testing.assert_close(split, whole)


def test_nothing_is_asked_without_exclusivity():
    def nobody(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    score_BHT = torch.randn(1, 2, 5)
    assert exclude_across_heads(score_BHT, 0.0, 2.0, nobody) is score_BHT


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_selector_scores_heads_apart_as_heads_together(backend, kernel_device):
    if backend == "triton":
        pytest.importorskip("triton")
    logits = (torch.randn(2, 4, 2, 1, 40) * 3).to(kernel_device)
    norm = (torch.rand(2, 4, 40) + 0.5).to(kernel_device)
    allowed = (torch.arange(40) < torch.tensor([[36], [20]])).to(kernel_device)
    score = selector.on(backend)
    whole, _ = score(logits, norm, allowed, **SETTINGS)

    def part(index: int, gather: Gather) -> torch.Tensor:
        ours = slice(2 * index, 2 * index + 2)
        args = (logits[:, ours].contiguous(), norm[:, ours].contiguous(), allowed)
        return score(*args, gather=gather, **SETTINGS)[0]

    torch.testing.assert_close(apart(2, part), whole)
