"""Dense attention and the window's logits (Eq. 4), over pages, against float64."""

import pytest
import torch

from sfi_kernels import pages
from sfi_kernels.dense_attention import dense_attention, window_logits
from tests.covering import each_value
from tests.fakes import causal_mask, error_bound, kernel_device, paged, plain_attention

H, G, D = 2, 2, 16
SCALE = 0.3
PAGE_SIZES = [16, 64, 1000]  # several pages, a page that is not full, one page for all
LENGTHS = [65, 9, 130]


class History:
    """Requests of different lengths, their last W tokens' queries, and the same keys in pages."""

    backend: str

    def __init__(self, page_size: int, W: int, lengths=LENGTHS, E: int = D, dtype=torch.float32):
        self.query = torch.randn(len(lengths), H, G, W, D).to(dtype)
        self.keys = [torch.randn(H, T, D).to(dtype) for T in lengths]
        self.values = [torch.randn(H, T, E).to(dtype) for T in lengths]
        self.length_B = torch.tensor(lengths, dtype=torch.int32)
        self.key_PHND, self.table_BP = paged(self.keys, page_size)
        self.value_PHNE, _ = paged(self.values, page_size)

    def run(self, op, rows: slice, *cached: torch.Tensor, **options) -> torch.Tensor:
        device = kernel_device(self.backend, self.query.dtype, self.key_PHND.shape[2])
        operands = (self.query[rows], *cached, self.table_BP[rows], self.length_B[rows])
        options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
        backend = "torch" if self.backend == "numba" and op is window_logits else self.backend
        return op.on(backend)(*(t.to(device) for t in operands), scale=SCALE, **options).cpu()

    def attend(self, rows: slice = slice(None), **options) -> torch.Tensor:
        return self.run(dense_attention, rows, self.key_PHND, self.value_PHNE, **options)

    def logits(self, rows: slice = slice(None), **options) -> torch.Tensor:
        return self.run(window_logits, rows, self.key_PHND, **options)

    def assert_plain(self, **options):
        """Compare each request with float64 attention over its own tokens."""
        out = self.attend(**options)
        assert out.dtype == self.query.dtype
        W = self.query.shape[3]
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            segment = self.query[row : row + 1], key[None], value[None]
            visible = causal_mask(W, key.shape[1])
            expected, _ = plain_attention(*segment, SCALE, visible=visible, **options)
            atol, _ = error_bound(*segment, SCALE)
            torch.testing.assert_close(
                out[row : row + 1].double(), expected, rtol=torch.finfo(out.dtype).eps, atol=atol
            )


@pytest.fixture(params=["torch", "triton", "numba"], autouse=True)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    History.backend = request.param
    return request.param


@pytest.mark.parametrize(
    ("page_size", "W", "dtype"),
    [
        (16, 1, torch.float32), (64, 2, torch.float16), (1000, 9, torch.float32),
        (64, 9, torch.bfloat16), (16, 9, torch.float16), (1000, 1, torch.bfloat16),
    ],
)  # fmt: skip
def test_queries_attend_causally_to_their_own_request(page_size: int, W: int, dtype: torch.dtype):
    """And a logit is the scaled product; later keys have none (Eq. 4)."""
    history = History(page_size, W, dtype=dtype)
    history.assert_plain()
    logits = history.logits()
    assert (logits.shape, logits.dtype) == ((3, H, G, W, max(LENGTHS)), torch.float32)
    for row, key in enumerate(history.keys):
        T = key.shape[1]
        expected = torch.full((H, G, W, max(LENGTHS)), -torch.inf, dtype=torch.float64)
        product = torch.einsum("hgwd,htd->hgwt", history.query[row].double(), key.double())
        expected[..., :T] = (product * SCALE).masked_fill(~causal_mask(W, T), -torch.inf)
        torch.testing.assert_close(logits[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 63, 64, 65])
def test_a_whole_prompt_attends_to_itself(T: int):
    History(64, W=T, lengths=[T]).assert_plain()


def test_a_piece_of_a_prompt_attends_to_what_was_read_before():
    History(64, W=70, lengths=[260, 129]).assert_plain()


@pytest.mark.parametrize(("page_size", "W"), [(16, 1), (1000, 9)])
def test_a_soft_cap_bends_every_logit_and_values_may_be_wider(page_size: int, W: int):
    History(page_size, W, E=24).assert_plain(soft_cap=0.5)


@pytest.mark.parametrize("W", [1, 9])
def test_a_learned_sink_takes_its_weight_once(W: int):
    sink_HG = torch.tensor([[2.0, -1.0], [0.0, 4.0]])
    History(16, W).assert_plain(sink_HG=sink_HG)


@pytest.mark.parametrize(("T", "dtype"), each_value([1, 100, 101, 263], [torch.float32, torch.bfloat16]))
def test_logits_do_not_depend_on_the_chunks_they_are_computed_in(T, dtype, monkeypatch):
    monkeypatch.setattr(pages, "WIDE", 100 * H * D)
    history = History(64, W=1, lengths=[T], dtype=dtype)
    query, key = history.query.float(), history.keys[0].float()
    expected = torch.einsum("bhgwd,htd->bhgwt", query, key) * SCALE
    torch.testing.assert_close(history.logits(), expected, rtol=1e-5, atol=1e-5)


def test_logits_bend_under_the_soft_cap():
    history = History(16, W=3)
    expected = 0.5 * torch.tanh(history.logits() / 0.5)
    seen = history.logits().isfinite()
    torch.testing.assert_close(history.logits(soft_cap=0.5)[seen], expected[seen])
    assert (history.logits(soft_cap=0.5)[~seen] == -torch.inf).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES[1:])
def test_a_request_in_a_batch_computes_what_it_computes_alone(page_size: int):
    history = History(page_size, W=2)
    together, logits = history.attend(), history.logits(longest=max(LENGTHS))
    for row, T in enumerate(LENGTHS):
        rows = slice(row, row + 1)
        assert torch.equal(together[rows], history.attend(rows))
        assert torch.equal(logits[rows, ..., :T], history.logits(rows))


def test_a_request_shorter_than_the_window_has_its_queries_last():
    """As in a left-padded batch; what stands before them gives zeros and logits of -inf."""
    history = History(16, W=9, lengths=[65, 4])
    out, logits = history.attend(), history.logits()
    assert (out[1, :, :, :5] == 0).all()
    assert (logits[1, :, :, :5] == -torch.inf).all()
    segment = history.query[1:, :, :, 5:], history.keys[1][None], history.values[1][None]
    expected, _ = plain_attention(*segment, SCALE, visible=causal_mask(4, 4))
    atol, _ = error_bound(*segment, SCALE)
    torch.testing.assert_close(out[1:, :, :, 5:].double(), expected, rtol=0, atol=atol)
