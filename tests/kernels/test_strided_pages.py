"""Pages of another engine: whatever their strides, each op gives what it gives for contiguous pages."""

import pytest
import torch

from sfi_kernels.code_scan import BatchCodes, code_scan
from sfi_kernels.decode_attention import decode_attention, resident_programs, sparse_attention, split_plan, work_items
from sfi_kernels.dense_attention import dense_attention, dense_attention_with_logits, window_logits
from sfi_kernels.launch import KernelLimitError
from sfi_kernels.pack import append, pack, pack_layers, recall
from sfi_kernels.pages import read_pages
from sfi_kernels.partial_attention import partial_attention
from sfi_kernels.step_descriptor import FAST, SLOW, StepRequest, describe_step
from tests.covering import case
from tests.fakes import error_bound, int32, kernel_device, paged, plain_attention

H, G, N, D, S = 2, 2, 16, 16, 12
# less than a page, some pages and a part of one, whole pages
LENGTHS = (5, 71, 32)
Pages = tuple[torch.Tensor, torch.Tensor]


def halves(P: int, H: int, N: int, D: int, E: int) -> Pages:
    """vLLM's pages on a GPU: a token's key and value side by side."""
    both = torch.full((P, H, N, D + E), torch.nan)
    return both[..., :D], both[..., D:]


def tokens_first(P: int, H: int, N: int, D: int, E: int) -> Pages:
    """The same, but tokens before heads in memory (NHD), and a page of each of three layers side by side."""
    both = torch.full((P, 3, N, H, D + E), torch.nan)[:, 1].transpose(1, 2)
    return both[..., :D], both[..., D:]


def transposed_keys(P: int, H: int, N: int, D: int, E: int) -> Pages:
    """vLLM's pages on a CPU: a page's keys lie [D, N], its values behind them."""
    both = torch.full((P, H, N * (D + E)), torch.nan)
    return both[..., : N * D].view(P, H, D, N).mT, both[..., N * D :].view(P, H, N, E)


class Case:
    def __init__(self, backend: str, E: int = D) -> None:
        self.backend, self.device = backend, kernel_device(backend)
        keys, values = ([torch.randn(H, T, width) for T in LENGTHS] for width in (D, E))
        (key, table), (value, _) = (paged(rows, N, spare_pages=1) for rows in (keys, values))
        self.pages = key, value
        self.table = table.to(self.device)
        self.query = torch.randn(3, H, G, 3, D).to(self.device)
        self.length = int32([*LENGTHS]).to(self.device)
        self.start = int32([2, 60, 20]).to(self.device)
        self.index = int32([[[3, 4], [4, -1]], [[7, 40], [17, 59]], [[9, -1], [15, 19]]])
        self.index = self.index.to(self.device)
        self.sink = int32([1, 2, 0]).to(self.device)

    def laid_out(self, layout) -> Pages:
        key, value = self.pages
        with torch.device(self.device):
            strided = layout(*key.shape, value.shape[3])
        for target, source in zip(strided, self.pages, strict=True):
            target.copy_(source)
        return strided

    def on(self, op):
        return op.on("torch" if self.backend == "numba" and op is pack else self.backend)

    @property
    def segment(self) -> tuple[torch.Tensor, ...]:
        """Packed keys, values, positions and lengths, with zeros."""
        key, value = (torch.zeros(3, H, S, x.shape[3], device=self.device) for x in self.pages)
        position, length = torch.zeros(3, H, S, device=self.device), self.length[:, None]
        return key, value, position.int(), length.repeat(1, H) * 0


def attends(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    attend = case.on(dense_attention)
    return [attend(case.query, key, value, case.table, case.length, scale=0.3)]


def caps(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    attend, sink_HG = case.on(dense_attention), torch.ones(H, G, device=case.device)
    options = {"scale": 0.3, "soft_cap": 5.0, "sink_HG": sink_HG}
    return [attend(case.query, key, value, case.table, case.length, **options)]


def makes_logits(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    return [case.on(window_logits)(case.query, key, case.table, case.length, scale=0.3)]


def attends_with_logits(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    return [*dense_attention_with_logits(case.query[:, :, :, -1:], key, value, case.table, case.length, scale=1)]


def verifies(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    operands = case.query, key, value, case.table, case.length
    return [*case.on(dense_attention_with_logits)(*operands, scale=1.0)]


def attends_sparsely(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    segment = packs(case, key, value)
    operands = *segment[:2], segment[3], key, value, case.table, case.start, case.length
    return [case.on(sparse_attention)(case.query[:, :, :, 0], *operands, scale=0.3)]


def chooses_by_codes(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Code the new keys, and choose three of more, for requests that decode fast."""
    requests = [StepRequest(mode=FAST, length=T, recent_start=T - 2, packed=4, sink=1) for T in LENGTHS]
    step = describe_step(requests, work_items(3, H, 1), torch.device("cpu"))
    codes = BatchCodes.empty(3, G, key, value, max(LENGTHS))
    torch.manual_seed(1)
    for part in (*codes[:3], codes.sum_BHE, codes.recent_BHXGD):
        part.normal_()
    codes.word_BHWT.random_()
    position, length = int32([[[-1] * 5] * H] * 3), int32([[0] * H] * 3)
    choice = case.on(code_scan)(
        case.query[:, :, :, 0], key, value, case.table, step, codes, position, length, budget=3, scale=0.3, rest=0.5
    )
    return [choice.index_BHK, *choice.pseudo, *codes, position, length]


def decodes(
    case: Case, key: torch.Tensor, value: torch.Tensor, queries: int = 1, heads: bool = False
) -> list[torch.Tensor]:
    """A fast request, a slow one with its evidence, and one more of either."""
    places = resident_programs(torch.device(case.device))
    requests = [
        StepRequest(
            mode=mode, length=T, recent_start=start, packed=4, sink=sink, count=count, mixed=mixed
        )
        for mode, T, start, sink, count, mixed in zip(
            (FAST, SLOW, FAST if heads else SLOW), LENGTHS, case.start.tolist(), case.sink.tolist(),
            (1, queries, queries), (False, False, heads), strict=True,
        )
    ]  # fmt: skip
    step = describe_step(requests, work_items(3, H, places), torch.device(case.device))
    case.on(split_plan)(step, H, places)
    segment = packs(case, key, value)
    out = case.on(decode_attention)(
        case.query[:, :, :, :queries], *segment[:2], segment[3], key, value, case.table, step,
        scale=0.3, evidence=True,
        dense_BH=int32([[0, 0], [0, 0], [1, 0]]).to(case.device) if heads else None,
    )  # fmt: skip
    assert out.logits_BHGWT is not None
    logits = [row[..., : LENGTHS[request]] for request, row in zip(step.slow, out.logits_BHGWT, strict=True)]
    return [out.out_BHGWE, *logits, out.log_sum_BHGW]


def decodes_a_draft(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    return decodes(case, key, value, queries=3)


def decodes_mixed_heads(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    return decodes(case, key, value, heads=True)


def packs(case: Case, key: torch.Tensor, value: torch.Tensor, **marks) -> list[torch.Tensor]:
    segment, request = case.segment, int32([0, 1, 2]).to(case.device)
    refreshed = case.table, request, case.index, case.sink
    case.on(pack)(key, value, *refreshed, *segment, **marks)
    return [*segment]


def packs_some_heads(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    return packs(case, key, value, heads_RH=int32([[1, 0], [0, 1], [1, 1]]).to(case.device))


def packs_layers(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The second layer's pages are contiguous, so that layers differ in their strides."""
    layers = [case.segment, case.segment]
    both = [(key, value, *layers[0]), (*case.pages, *layers[1])]
    pack_layers(both, case.table, 1, case.index[[1, 1]], case.sink[1:2])
    return [*layers[0], *layers[1]]


def recalls(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    old, into, fetched = case.segment, case.segment, int32([[0] * H] * 3).to(case.device)
    refreshed = case.table, int32([0, 1, 2]).to(case.device), case.index, case.sink
    case.on(recall)(key, value, *refreshed, *old, *into, fetched)
    return [*into, fetched]


def appends(case: Case, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return all pages: nothing but the new rows may change."""
    torch.manual_seed(1)
    new = [torch.randn(3, H, 20, x.shape[3]).to(case.device) for x in (key, value)]
    norm = torch.zeros(key.shape[:3], device=case.device)
    count = int32([3, 20, 0]).to(case.device)
    case.on(append)(*new, case.length, count, key, value, norm, case.table)
    return [key, value, norm]


WITH_KERNEL = (
    attends, caps, makes_logits, attends_sparsely, decodes, decodes_a_draft, decodes_mixed_heads,
    packs, packs_some_heads, recalls, appends,
)  # fmt: skip
ON_CPU = (attends_with_logits, verifies, packs_layers)
CASES = [
    case("torch", run, layout, E, kept=True)
    for run in (*WITH_KERNEL, *ON_CPU)
    for layout, E in ((halves, D), (tokens_first, 24), (transposed_keys, 24))
]
CASES += [("numba", run, halves, D) for run in (attends, caps, verifies, attends_sparsely, chooses_by_codes)]
# what a kernel takes: the numbers of a row lie together
CASES += [
    case("triton", run, layout, E, kept=layout is tokens_first)
    for run in WITH_KERNEL
    for layout, E in ((halves, D), (tokens_first, 24))
]


@pytest.mark.parametrize(("backend", "run", "layout", "E"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_an_op_gives_what_it_gives_for_contiguous_pages(backend: str, run, layout, E: int):
    if backend == "numba":
        pytest.importorskip("numba")
    case = Case(backend, E)
    strided = case.laid_out(layout)
    assert not any(pages.is_contiguous() for pages in strided)
    expected = run(case, *(pages.clone().to(case.device) for pages in case.pages))
    for ours, want in zip(run(case, *strided), expected, strict=True):
        torch.testing.assert_close(ours, want, equal_nan=True)


@pytest.mark.parametrize("run", [attends, makes_logits, decodes, packs, recalls, appends])
def test_a_kernel_wants_the_numbers_of_a_row_together(run):
    case = Case("triton")
    message = r"^key(_pages)? must have a last stride of 1 for the Triton kernels, got 16; use the torch"
    with pytest.raises(KernelLimitError, match=message):
        run(case, *case.laid_out(transposed_keys))


@pytest.mark.parametrize("length", [5, N])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_gets_rows_that_lie_together(length: int, causal: bool):
    """PyTorch's, on a CPU, is wrong without a word for transposed keys, in one page a view."""
    case = Case("torch")
    views = [read_pages(pages, case.table[1], 0, length) for pages in case.laid_out(transposed_keys)]
    assert views[0].stride(-1) == N
    query = torch.randn(1, H, G, length, D)
    out, _ = partial_attention(query, *views, scale=0.3, causal=causal)
    visible = torch.ones(length, length).tril() if causal else None
    want, _ = plain_attention(query, *views, 0.3, visible=visible)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=error_bound(query, *views, 0.3)[0])
