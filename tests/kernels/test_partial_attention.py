"""Attention over one segment, the exact joining of segments, and attention over blocks, against float64."""

import pytest
import torch

from sfi_kernels import partial_attention as module
from sfi_kernels import partial_attention as segments
from tests.covering import covering, each_value
from tests.fakes import causal_mask, error_bound, plain_attention

B, H, G, D = 2, 2, 2, 16
SCALE = 0.3
LENGTHS = [1, 63, 64, 65, 1000]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Segment = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(T: int, *, G: int = 2, W: int = 1, E: int = D, dtype=torch.float32) -> Segment:
    query = torch.randn(B, H, G, W, D).to(dtype)
    return query, torch.randn(B, H, T, D).to(dtype), torch.randn(B, H, T, E).to(dtype)


def assert_plain(part: tuple[torch.Tensor, torch.Tensor], segment: Segment, **options):
    """Compare with the float64 result of the inputs as they were rounded."""
    out, lse = plain_attention(*segment, SCALE, **options)
    of_out, of_lse = error_bound(*segment, SCALE)
    assert [tensor.dtype for tensor in part] == [torch.float32] * 2
    torch.testing.assert_close(part[0].double(), out, rtol=0, atol=of_out)
    torch.testing.assert_close(part[1].double(), lse, rtol=0, atol=of_lse)


@pytest.fixture(params=["fused", "explicit"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on PyTorch's fused kernel and on our own; a path that is not meant must not run."""

    def refuse(*args: object) -> None:
        raise AssertionError("the other path ran")

    if request.param == "fused":
        monkeypatch.setattr(module, "_explicit", refuse)
    else:

        def explicit(query, key, value, scale, causal):
            T = key.shape[2]
            mask = torch.ones(T, T, dtype=torch.bool).tril() if causal else None
            return module._explicit(query, key, value, scale, None, mask)  # noqa: SLF001

        monkeypatch.setattr(module, "_fused", explicit)
    return request.param


@pytest.mark.parametrize(("T", "dtype"), each_value(LENGTHS, DTYPES))
def test_a_segment_is_softmax_attention(path: str, T: int, dtype: torch.dtype):
    segment = inputs(T, dtype=dtype)
    assert_plain(segments.partial_attention(*segment, scale=SCALE), segment)


@pytest.mark.parametrize(("G", "W"), [(1, 5), (2, 1), (4, 5)])
def test_every_query_of_a_group_and_window_attends_for_itself(path: str, G: int, W: int):
    segment = inputs(63, G=G, W=W)
    assert_plain(segments.partial_attention(*segment, scale=SCALE), segment)


@pytest.mark.parametrize(("T", "G", "dtype"), covering(LENGTHS[:-1], [1, 2, 4], DTYPES))
def test_a_causal_query_sees_itself_and_what_is_before_it(path: str, T: int, G: int, dtype: torch.dtype):
    segment = inputs(T, G=G, W=T, dtype=dtype)
    part = segments.partial_attention(*segment, scale=SCALE, causal=True)
    assert_plain(part, segment, visible=causal_mask(T, T))


@pytest.mark.parametrize("causal", [False, True])
def test_values_may_be_wider_than_keys(causal: bool):
    segment = inputs(65, W=65, E=24)
    part = segments.partial_attention(*segment, scale=SCALE, causal=causal)
    assert_plain(part, segment, visible=causal_mask(65, 65) if causal else None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [1, 63])
def test_a_soft_cap_bends_the_logits_before_the_softmax(causal: bool, T: int):
    segment = inputs(T, W=T)
    part = segments.partial_attention(*segment, scale=SCALE, soft_cap=0.5, causal=causal)
    assert_plain(part, segment, soft_cap=0.5, visible=causal_mask(T, T) if causal else None)


def test_a_soft_cap_keeps_small_logits_and_bounds_large_ones():
    logits = torch.tensor([-1e6, -0.01, 0.0, 0.01, 1e6])
    expected = torch.tensor([-30.0, -0.01, 0.0, 0.01, 30.0])
    torch.testing.assert_close(segments.capped(logits, 30.0), expected)
    assert segments.capped(logits, None) is logits


@pytest.mark.parametrize(("dtype", "W"), each_value(DTYPES, [1, 5]))
def test_a_query_reads_only_the_keys_it_is_shown(W: int, dtype: torch.dtype):
    segment = inputs(63, W=W, dtype=dtype)
    visible = torch.rand(B, H, 1, W, 63) < 0.5
    part = segments.partial_attention(*segment, scale=SCALE, visible_BHGWT=visible)
    assert_plain(part, segment, visible=visible)


def test_a_query_that_sees_nothing_gets_zeros():
    segment = inputs(9, W=2)
    visible = torch.ones(B, H, 1, 2, 9, dtype=torch.bool)
    visible[1, :, :, 0] = False
    out, lse = segments.partial_attention(*segment, scale=SCALE, visible_BHGWT=visible)
    assert (out[1, :, :, 0] == 0).all()
    assert (lse[1, :, :, 0] == -torch.inf).all()
    assert_plain((out, lse), segment, visible=visible)


@pytest.mark.parametrize("path", ["explicit"], indirect=True)
def test_a_broken_key_is_not_hidden(path: str):
    """NaN reaches the logits, where the sampler reports it."""
    query, key, value = inputs(9)
    key[0, 0, 3] = torch.nan
    out, _ = segments.partial_attention(query, key, value, scale=SCALE)
    assert out[0, 0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(("block_elements", "per_query"), [(1, True), (2 * B * H * 2 * 65, False), (1 << 24, True)])
def test_the_queries_of_a_block_do_not_change_the_result(monkeypatch, block_elements, per_query):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block_elements)
    segment = inputs(65, W=7)
    visible = torch.rand(B, 1, 1, 7 if per_query else 1, 65) < 0.7
    part = segments.partial_attention(*segment, scale=SCALE, visible_BHGWT=visible)
    assert_plain(part, segment, visible=visible)


@pytest.mark.parametrize(("split", "dtype"), each_value([1, 31, 64], DTYPES))
def test_two_segments_joined_are_one(path: str, split: int, dtype: torch.dtype):
    query, key, value = inputs(65, W=3, dtype=dtype)
    parts = [
        segments.partial_attention(query, key[:, :, part], value[:, :, part], scale=SCALE)
        for part in (slice(split), slice(split, None))
    ]
    expected, _ = plain_attention(query, key, value, SCALE)
    atol, _ = error_bound(query, key, value, SCALE)
    torch.testing.assert_close(segments.combine(parts).double(), expected, rtol=0, atol=atol)


def test_a_segment_that_shows_nothing_adds_nothing():
    query, key, value = inputs(20)
    nothing = torch.zeros(1, 1, 1, 1, 20, dtype=torch.bool)
    empty = segments.partial_attention(query, key, value, scale=SCALE, visible_BHGWT=nothing)
    part = segments.partial_attention(query, key, value, scale=SCALE)
    torch.testing.assert_close(segments.combine([empty, part]), part[0])
    assert torch.equal(segments.combine([empty, empty]), torch.zeros_like(part[0]))


def test_segments_of_very_different_weight_join_without_overflow():
    query, key, value = inputs(20)
    faint = segments.partial_attention(query, key, value, scale=SCALE)
    strong = (faint[0] + 1, faint[1] + 1e4)
    torch.testing.assert_close(segments.combine([faint, strong]), strong[0])


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_learned_sink_takes_weight_but_has_no_value(pieces: int):
    query, key, value = inputs(63, G=2, W=3)
    sink_HG = torch.tensor([[2.0, -1.0], [0.0, 4.0]])
    parts = [
        segments.partial_attention(query, k, v, scale=SCALE)
        for k, v in zip(key.chunk(pieces, 2), value.chunk(pieces, 2), strict=True)
    ]
    expected, _ = plain_attention(query, key, value, SCALE, sink_HG=sink_HG)
    atol, _ = error_bound(query, key, value, SCALE)
    torch.testing.assert_close(segments.combine(parts, sink_HG).double(), expected, rtol=0, atol=atol)


OPTIONS = [{}, {"soft_cap": 0.5}, {"sink_HG": torch.tensor([[2.0, -1.0], [0.0, 4.0]])}]


@pytest.mark.parametrize(
    ("W", "options", "E", "dtype"), covering([1, 9, 70], OPTIONS, [D, 24], [torch.float32, torch.float16])
)
def test_the_last_queries_attend_causally(W: int, options: dict, E: int, dtype: torch.dtype):
    query, key, value = (torch.randn(1, *size).to(dtype) for size in ((H, G, W, D), (H, 70, D), (H, 70, E)))
    out = segments.causal_attention(query, key, value, scale=SCALE, **options)
    assert out.dtype == dtype
    expected, _ = plain_attention(query, key, value, SCALE, visible=causal_mask(W, 70), **options)
    atol, _ = error_bound(query, key, value, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=atol)
