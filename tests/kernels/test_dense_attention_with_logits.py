"""Dense attention that hands out the last query's logits, in one pass: of a step or of a verification."""

import pytest
import torch

from sfi_kernels import pages
from sfi_kernels.dense_attention import dense_attention_with_logits
from tests.covering import covering
from tests.fakes import causal_mask, error_bound, paged, plain_attention

H, G, D, SCALE = 2, 2, 16, 0.3
LENGTHS = [97, 9, 64]  # a part of a chunk, less than one, whole ones
OPTIONS = [{}, {"soft_cap": 0.5}, {"sink_HG": torch.tensor([[2.0, -1.0], [0.0, 4.0]])}]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Let a chunk be 64 tokens of one KV head, 32 of two."""
    monkeypatch.setattr(pages, "WIDE", 32 * H * D)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("backend", "page_size", "W", "options", "dtype"),
    covering(["numba", "torch"], [16, 128], [1, 2, 5, 12, 17], OPTIONS, [torch.float32, torch.float16, torch.bfloat16]),
)
def test_queries_attend_causally_and_the_last_hands_out_its_logits(backend, page_size, W, options, dtype):
    if backend == "numba":
        pytest.importorskip("numba")
    query = torch.randn(len(LENGTHS), H, G, W, D).to(dtype)
    keys = [torch.randn(H, T, D).to(dtype) for T in LENGTHS]
    values = [torch.randn(H, T, D + 8).to(dtype) for T in LENGTHS]
    (key_PHND, table_BP), (value_PHNE, _) = paged(keys, page_size), paged(values, page_size)
    length_B = torch.tensor(LENGTHS, dtype=torch.int32)
    operands = query, key_PHND, value_PHNE, table_BP, length_B
    out, logits = dense_attention_with_logits.on(backend)(*operands, scale=SCALE, **options)
    assert out.dtype == dtype
    assert logits.shape == (len(LENGTHS), H, G, 1, max(LENGTHS))
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        rows = slice(row, row + 1)
        check_output(out[rows], query[rows], key[None], value[None], options)
        expected = evidence_of(query[row], key, options.get("soft_cap"))
        torch.testing.assert_close(logits[row, ..., 0, : LENGTHS[row]].double(), expected, rtol=1e-5, atol=1e-5)
        assert (logits[row, ..., LENGTHS[row] :] == -torch.inf).all()


def check_output(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict) -> None:
    """Compare a request's output with the textbook's; queries before its first token are padding."""
    queries = min(query.shape[3], key.shape[2])
    segment = query[:, :, :, -queries:], key, value
    visible = causal_mask(queries, key.shape[2])
    expected, _ = plain_attention(*segment, SCALE, visible=visible, **options)
    atol, _ = error_bound(*segment, SCALE)
    rtol = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out[:, :, :, -queries:].double(), expected, rtol=rtol, atol=atol)
    assert not out[:, :, :, :-queries].any()


def evidence_of(query_HGWD: torch.Tensor, key_HTD: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Return the last query's logits, the product written out, [H, G, T]."""
    chosen_HGD = query_HGWD[:, :, -1].double()
    logits = SCALE * torch.einsum("hgd,htd->hgt", chosen_HGD, key_HTD.double())
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return logits
