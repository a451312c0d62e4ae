"""Dense attention over blocks of any sizes, against float64 and against the ops over pages."""

from typing import Any

import pytest
import torch

from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.partial_attention import streamed_attention, streamed_attention_with_logits, streamed_logits
from tests.covering import covering
from tests.fakes import causal_mask, error_bound, paged, plain_attention

H, G, D, SCALE = 2, 2, 16, 0.3
# one block; blocks of one token; a border inside the window of the last queries, and several
BLOCKS = [[70], [1] * 12, [60, 10], [59, 3, 3, 5], [3, 64, 1, 2]]
OPTIONS: list[dict[str, Any]] = [{}, {"soft_cap": 0.5}, {"sink_HG": torch.tensor([[2.0, -1.0], [0.0, 4.0]])}]


class Streamed:
    """A request's last W queries, its keys and values, and the same in blocks."""

    def __init__(self, sizes: list[int], W: int, E: int, dtype: torch.dtype) -> None:
        self.length = sum(sizes)
        self.query = torch.randn(1, H, G, W, D).to(dtype)
        self.key = torch.randn(1, H, self.length, D).to(dtype)
        self.value = torch.randn(1, H, self.length, E).to(dtype)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.blocks = [
            (end - size, self.key[:, :, end - size : end], self.value[:, :, end - size : end])
            for size, end in zip(sizes, ends, strict=True)
        ]
        self.key_PHND, self.table_BP = paged([self.key[0]], 16)
        self.value_PHNE, _ = paged([self.value[0]], 16)
        self.length_B = torch.tensor([self.length], dtype=torch.int32)

    def assert_plain(self, out: torch.Tensor, **options: Any) -> None:
        """Compare with float64, and with the op over pages."""
        assert out.dtype == self.query.dtype
        visible = causal_mask(self.query.shape[3], self.length)
        segment = self.query, self.key, self.value
        expected, _ = plain_attention(*segment, SCALE, visible=visible, **options)
        atol, _ = error_bound(*segment, SCALE)
        rtol = torch.finfo(out.dtype).eps
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
        paged_out = dense_attention(
            self.query, self.key_PHND, self.value_PHNE, self.table_BP, self.length_B, scale=SCALE, **options
        )
        torch.testing.assert_close(out, paged_out, rtol=rtol, atol=2 * atol)

    def window_logits(self, soft_cap: float | None) -> torch.Tensor:
        operands = self.query, self.key_PHND, self.table_BP, self.length_B
        return window_logits(*operands, scale=SCALE, soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("sizes", "W", "options", "E", "dtype"),
    covering(BLOCKS, [1, 9, 12], OPTIONS, [D, 24], [torch.float32, torch.float16]),
)
def test_queries_attend_causally_across_the_borders_of_blocks(
    sizes: list[int], W: int, options: dict[str, Any], E: int, dtype: torch.dtype
):
    """The logits are those over pages, and later keys have none (Eq. 4)."""
    made, cap = Streamed(sizes, W, E, dtype), options.get("soft_cap")
    out = streamed_attention(made.query, iter(made.blocks), made.length, scale=SCALE, **options)
    made.assert_plain(out, **options)
    logits = streamed_logits(made.query, made.blocks, made.length, scale=SCALE, soft_cap=cap)
    torch.testing.assert_close(logits, made.window_logits(cap), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits == -torch.inf, ~causal_mask(W, made.length).expand_as(logits))
    made.query = made.query[:, :, :, -1:]
    out, logits = streamed_attention_with_logits(made.query, made.blocks, scale=SCALE, **options)
    made.assert_plain(out, **options)
    torch.testing.assert_close(logits, made.window_logits(cap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", BLOCKS)
def test_a_whole_prompt_may_come_in_blocks(sizes: list[int]):
    """The first query sees one key, whatever block the others are in."""
    made = Streamed(sizes, sum(sizes), D, torch.float32)
    out = streamed_attention(made.query, made.blocks, made.length, scale=SCALE)
    made.assert_plain(out)


def test_one_head_s_blocks_give_that_head():
    made = Streamed([40, 30], 9, D, torch.float32)
    whole = streamed_attention(made.query, made.blocks, made.length, scale=SCALE)
    one = [(start, key[:, 1:], value[:, 1:]) for start, key, value in made.blocks]
    own = streamed_attention(made.query[:, 1:], one, made.length, scale=SCALE)
    torch.testing.assert_close(own, whole[:, 1:])
