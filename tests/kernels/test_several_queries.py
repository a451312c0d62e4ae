"""Requests that verify a draft: several queries each, beside others that have one, against float64."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch

from sfi_kernels.attention_tile import EACH, LAST, SEVERAL, parts_of_pass, tile_shape
from sfi_kernels.decode_attention import DecodeAttention, decode_attention, split_plan, work_items
from sfi_kernels.launch import Target
from sfi_kernels.step_descriptor import FAST, IDLE, SLOW, SPLITS, UNIT, StepDescriptor, StepRequest, describe_step
from tests.fakes import causal_mask, error_bound, plain_attention
from tests.kernels.test_decode_attention import SCALE, SINK, H, Step

# a unit of 64 tokens filled, missed by one and passed by one; requests no longer than their queries
LENGTHS = [150, 64, 65, 63, 17, 4, 260, 130, 30]
MODES = [SLOW, FAST, SLOW, SLOW, SLOW, SLOW, SLOW, IDLE, FAST]
COUNTS = [5, 1, 17, 2, 17, 4, 1, 0, 1]


@dataclass
class Verification(Step):
    """A step whose slow requests have several queries; padding holds NaN, so that reading it shows."""

    counts: list[int] = field(default_factory=lambda: COUNTS)
    W: int = 17

    def __post_init__(self) -> None:
        super().__post_init__()
        B, W = len(self.lengths), self.W
        self.query = torch.randn(B, H, self.G, W, self.D).to(self.dtype)
        for row, count in enumerate(self.counts):
            self.query[row, :, :, : W - count] = torch.nan

    def descriptor(self) -> StepDescriptor:
        requests = [
            StepRequest(mode=mode, length=T, recent_start=start, packed=70, sink=min(SINK, T), count=count)
            for mode, T, start, count in zip(self.modes, self.lengths, self.starts, self.counts, strict=True)
        ]
        places = self.places or 8
        step = describe_step(requests, work_items(len(requests), H, places), self.device)
        split_plan.on(self.backend)(step, H, places)
        return step

    def operands(self) -> dict[str, Any]:
        return super().operands() | {"query_BHGWD": self.query.to(self.device)}

    def assert_plain(
        self, sink_HG: torch.Tensor | None = None, soft_cap: float | None = None, *, into: torch.Tensor | None = None
    ) -> DecodeAttention:
        """Compare every query with float64 attention over the tokens up to its own, and the evidence."""
        options = {"sink_HG": sink_HG, "soft_cap": soft_cap, "into": into}
        result = self.attend(evidence=True, **options)
        out = result.out_BHGWE
        assert out.shape == (*self.query.shape[:4], self.E)
        for row, count in enumerate(self.counts):
            first = self.W - count
            assert (out[row, :, :, :first] == 0).all()
            for head in range(H if count else 0):
                segment = self.query[row, head, :, first:][None, None], *self.visible_rows(row, head)
                visible = causal_mask(count, segment[1].shape[2])
                sink = None if sink_HG is None else sink_HG[head : head + 1]
                expected, _ = plain_attention(*segment, SCALE, visible=visible, soft_cap=soft_cap, sink_HG=sink)
                atol, _ = error_bound(*segment, SCALE)
                got = out[row, head, :, first:].double()
                torch.testing.assert_close(got, expected[0, 0], rtol=0, atol=atol)
        self.assert_evidence(result, soft_cap)
        return result

    def assert_evidence(self, result: DecodeAttention, soft_cap: float | None) -> None:
        """Compare the slow requests' logits with Eq. 4 for their last query, and the sum over J."""
        slow = [row for row, mode in enumerate(self.modes) if mode == SLOW]
        assert result.logits_BHGWT.shape[:4] == (len(slow), H, self.G, 1)
        for (place, row), head in product(enumerate(slow), range(H)):
            key, value = self.visible_rows(row, head)
            query = self.query[row, head, :, -1:][None, None]
            _, bound = error_bound(query, key, value, SCALE)
            expected = query[0, 0, :, 0].double() @ key[0, 0].double().mT * SCALE
            if soft_cap is not None:
                expected = soft_cap * torch.tanh(expected / soft_cap)
            got = result.logits_BHGWT[place, head, :, 0, : self.lengths[row]].double()
            torch.testing.assert_close(got[:, : key.shape[2]], expected, rtol=0, atol=bound)
            assert (got[:, key.shape[2] :] == -torch.inf).all()
            in_J = expected[:, min(SINK, self.lengths[row]) : self.starts[row]].logsumexp(-1)
            sums = result.log_sum_BHGW[place, head, :, 0].double()
            torch.testing.assert_close(sums, in_J, rtol=0, atol=bound)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_requests_with_any_number_of_queries_share_a_step(backend: str, dtype: torch.dtype):
    Verification(backend, LENGTHS, MODES, dtype=dtype).assert_plain()


@pytest.mark.parametrize("W", [1, 2, 8, 9, 16])
def test_every_number_of_queries_up_to_a_drafts_most(backend: str, W: int):
    """The draft of 16 tokens, the default's most, and the token before."""
    counts = [W, 1, max(1, W - 1)]
    Verification(backend, [130, 65, 64], [SLOW, FAST, SLOW], counts=counts, W=W).assert_plain()


@pytest.mark.parametrize("length", [17, 63, 65, 80, 128])
def test_the_causal_limit_lies_anywhere_in_a_tile(backend: str, length: int):
    Verification(backend, [length, length], [SLOW, SLOW], counts=[17, 9]).assert_plain()


@pytest.mark.parametrize(("G", "D", "E", "W"), [(1, 16, 16, 17), (4, 24, 40, 9), (8, 16, 16, 17), (3, 160, 160, 17)])
def test_heads_and_groups_of_any_size(backend: str, G: int, D: int, E: int, W: int):
    """Up to 136 rows, more than the largest tile has; 51 rows of wide heads make two tiles in float32."""
    step = Verification(backend, [70, 65], [SLOW, SLOW], G=G, D=D, E=E, counts=[W, 2], W=W)
    step.assert_plain()


@pytest.mark.parametrize("places", [2, 8, 64])
def test_the_plan_does_not_change_the_result(backend: str, places: int):
    """One split a request, a few, and many; among them one that only the last queries see.

    A learned sink takes its weight from every query, and once.
    """
    step = Verification(backend, [513, 300], [SLOW, FAST], counts=[9, 1], W=9, places=places)
    splits = step.descriptor().table_BX[:, SPLITS].tolist()
    assert (max(splits) == 1) == (places == 2)
    step.assert_plain(sink_HG=torch.tensor([[2.0, -1.0], [0.0, 4.0]]))


def test_the_last_query_hands_out_its_logits(backend: str):
    step = Verification(backend, [150, 65, 17], [SLOW, FAST, SLOW], counts=[5, 1, 17])
    room = torch.full((2 * H * 2 * 150,), torch.nan)
    result = step.assert_plain(into=room)
    assert torch.equal(result.out_BHGWE, step.attend().out_BHGWE)


def test_a_draft_of_one_token_attends_as_a_step_does(backend: str):
    """Bit for bit: the rows of W and those of one query lie in the same tile."""
    step = Verification(backend, [300, 65], [SLOW, FAST], counts=[1, 1], W=4)
    alone = replace(step, W=1)
    alone.__dict__.update({n: getattr(step, n) for n in ("key_PHND", "value_PHNE", "packed")})
    alone.query = step.query[:, :, :, -1:]
    got, expected = (one.attend(evidence=True) for one in (step, alone))
    assert torch.equal(got.out_BHGWE[:, :, :, -1:], expected.out_BHGWE)
    assert torch.equal(got.logits_BHGWT, expected.logits_BHGWT)
    assert torch.equal(got.log_sum_BHGW, expected.log_sum_BHGW)


def test_a_pass_has_room_for_every_requests_queries(backend: str):
    step = Verification(backend, [300, 65], [SLOW, FAST], counts=[5, 1], W=5)
    operands = step.operands()
    operands["query_BHGWD"] = operands["query_BHGWD"][:, :, :, 1:]
    with pytest.raises(ValueError, match=r"^query must have W >= 5, got \[2, 2, 2, 4, 16\]$"):
        decode_attention.on(backend)(**operands, descriptor=step.descriptor(), scale=SCALE)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("full", [False, True])
def test_every_query_has_a_row_and_tiles_divide_pages(capability: int, full: bool):
    for G, W, D in product((1, 3, 4, 8, 16), (1, 2, 8, 9, 17), (64, 128, 256)):
        chip, dtype = Target(capability, 132), torch.float32 if full else torch.bfloat16
        key = torch.empty(1, 1, 64, D, dtype=dtype)
        parts = parts_of_pass(G, W, tile_shape(key, key, 64, chip), chip, full=full)
        assert [part.kind for part in parts] == ([EACH] if W == 1 else [LAST, SEVERAL])
        queries = [G] if W == 1 else [G, G * W]
        for part, rows in zip(parts, queries, strict=True):
            assert (part.tiles - 1) * part.tile.rows < rows <= part.tiles * part.tile.rows
            assert UNIT % part.tile.tokens == 0
