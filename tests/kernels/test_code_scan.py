"""The choice of a whole batch by codes: the kernels against the reference, and the reference by hand."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map_only

from sfi_kernels.code_scan import BatchCodes, CodeBasis, code_scan, code_tokens, words
from sfi_kernels.code_scan.reference import scanned
from sfi_kernels.step_descriptor import FAST, IDLE, SLOT, SLOW, NewRows, StepDescriptor, StepRequest, describe_step
from tests.fakes import coarse, kernel_device

pytest.importorskip("triton")
PAGE, BUDGET, SINK, RECENT, SCALE, REST = 16, 24, 3, 8, 0.4, 0.3
NEW = 5  # tokens of the slow request
# mode, tokens: several chunks, fewer keys than the budget, an idle and a slow request, no candidates
REQUESTS = ((FAST, 1900), (FAST, 30), (IDLE, 0), (SLOW, 50), (FAST, 9))


class Case:
    """Operands of one layer; `step` is made anew for each backend, which overwrites what it may."""

    def __init__(self, H: int, G: int, D: int, E: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(D + G)
        B = len(REQUESTS)
        pages = -(-max(tokens for _, tokens in REQUESTS) // PAGE)
        self.query = torch.randn(B, H, G, D).to(dtype)
        self.key, self.value = (torch.randn(B * pages, H, PAGE, n).to(dtype) for n in (D, E))
        self.table = torch.randperm(B * pages).view(B, pages).int()
        self.codes = BatchCodes.empty(B, G, self.key, self.value, pages * PAGE)
        for row in range(B):
            C = 16 * words(D)
            self.codes.learn(row, CodeBasis(torch.randn(H, D), torch.randn(H, D, C) * 0.2, torch.randn(H, D, C) * 0.2))
        self.step = step_of(REQUESTS)
        whole = tuple((FAST if tokens else IDLE, tokens) for _, tokens in REQUESTS)
        code_tokens.reference(self.key, self.table, step_of(whole, all_new=True), self.codes)
        self.codes.word_BHWT[0, :, :, -1] = -1  # the new token's is made by the op

    def on(self, device: str) -> "Case":
        other = copy.copy(self)
        other.query, other.key, other.value, other.table = (
            x.to(device) for x in (self.query, self.key, self.value, self.table)
        )
        other.codes = BatchCodes(*(part.to(device) for part in self.codes))
        other.step = replace(self.step, buffer=self.step.buffer.to(device))
        return other

    def run(self, backend: str, *, diagnoses: bool = False, slots: int = len(REQUESTS)) -> tuple:
        """Return what the op gave and changed, on the CPU; its operands stay where they are."""
        B, H = slots, self.query.shape[1]
        case = self.on(kernel_device(backend))
        codes = BatchCodes(*(part.clone() for part in case.codes))
        position = case.table.new_full((B, H, SINK + BUDGET), 7)
        length = case.table.new_zeros(B, H)
        choice = code_scan.on(backend)(
            case.query, case.key, case.value, case.table, case.step, codes, position, length,
            budget=BUDGET, scale=SCALE, rest=REST, diagnoses=diagnoses,
        )  # fmt: skip
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, (choice, codes, position, length))

    def late(self) -> "Case":
        """Return a copy whose new rows are not in the pages yet, but in the descriptor."""
        other = copy.copy(self)
        other.key, other.value = self.key.clone(), self.value.clone()
        other.norm = other.key.new_zeros(other.key.shape[:3], dtype=torch.float32)
        rows = [x.new_zeros(len(REQUESTS), x.shape[1], NEW, x.shape[3]) for x in (self.key, self.value)]
        for row, (mode, tokens) in enumerate(REQUESTS):
            new = {IDLE: 0, SLOW: NEW}.get(mode, 1)
            for t in range(tokens - new, tokens):
                at = self.table[row, t // PAGE], slice(None), t % PAGE
                for pages, new_rows in zip((other.key, other.value), rows, strict=True):
                    new_rows[row, :, NEW - tokens + t] = pages[at]
                    pages[at] = torch.nan
        other.step = replace(self.step, new=NewRows(*rows, other.value, other.norm))
        return other


def step_of(requests: tuple[tuple[int, int], ...], *, all_new: bool = False) -> StepDescriptor:
    step_requests = []
    for mode, tokens in requests:
        sink = min(SINK, tokens)
        recent = max(sink, tokens - RECENT)
        new = 0 if mode == IDLE else NEW if mode == SLOW else 1
        step_requests.append(
            StepRequest(
                mode=SLOW if all_new and tokens else mode, length=tokens, recent_start=recent, packed=0,
                sink=sink, count=tokens if all_new else new,
            )
        )  # fmt: skip
    return describe_step(step_requests, 0, torch.device("cpu"))


@pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
def test_rows_find_what_is_kept_by_slot(backend):
    """As under vLLM: fewer slots than rows, and a slow row without one, of which nothing is coded."""
    if backend == "numba":
        pytest.importorskip("numba")
    case = Case(2, 3, 16, 16)
    wanted, codes, position, length = case.run(backend)
    slots, fast = [2, 0, -1, -1, 1], [0, 1, 4]
    rows = [slots.index(slot) for slot in range(3)]
    case.codes = BatchCodes(*(part[rows] for part in case.codes))
    case.step = replace(case.step, buffer=case.step.buffer.clone())
    case.step.table_BX[:, SLOT] = torch.tensor(slots, dtype=torch.int32)
    choice, own_codes, own_position, own_length = case.run(backend, slots=3)
    for ours, theirs in zip((choice.index_BHK, *choice.pseudo), (wanted.index_BHK, *wanted.pseudo), strict=True):
        assert torch.equal(ours[fast], theirs[fast])
    for ours, theirs in zip((*own_codes, own_position, own_length), (*codes, position, length), strict=True):
        assert torch.equal(ours, theirs[rows])


@pytest.mark.parametrize("backend", ["triton", "numba"])
@pytest.mark.parametrize(
    ("G", "D", "E", "dtype"), [(1, 16, 16, torch.float32), (3, 72, 40, torch.float16), (16, 130, 16, torch.float32)]
)
def test_the_kernels_choose_what_the_reference_chooses(backend, G, D, E, dtype):
    """A ragged batch: the same positions, codes, sums, pseudo tokens and queries kept."""
    if backend == "numba":
        pytest.importorskip("numba")
    case = Case(2, G, D, E, dtype)
    wanted, codes, position, length = case.run("torch", diagnoses=True)
    ours, own_codes, own_position, own_length = case.run(backend, diagnoses=True)
    for name, value_BH in ours.diagnostics.items():
        expected_BH = wanted.diagnostics[name]
        torch.testing.assert_close(value_BH[[0, 1, 4]], expected_BH[[0, 1, 4]], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.equal(own_codes.recent_BHXGD, codes.recent_BHXGD)
    fast = [row for row, (mode, _) in enumerate(REQUESTS) if mode == FAST]
    assert torch.equal(own_codes.word_BHWT, codes.word_BHWT)
    assert torch.equal(own_codes.summed_BH, codes.summed_BH)
    torch.testing.assert_close(own_codes.sum_BHE, codes.sum_BHE, rtol=1e-4, atol=1e-3)
    for row in fast:
        assert torch.equal(ours.index_BHK[row], wanted.index_BHK[row])
        assert torch.equal(own_position[row], position[row])
        assert torch.equal(own_length[row], length[row])
    (logit, value), (own_logit, own_value) = (
        (choice.pseudo.part()[1][..., 0], choice.pseudo.value_BHE) for choice in (wanted, ours)
    )
    torch.testing.assert_close(own_logit[fast], logit[fast], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(own_value[fast], value[fast], rtol=1e-4, atol=1e-4)


def test_the_reference_takes_the_highest_scores_and_of_equal_ones_the_first():
    """From the logits in float64: 8 bits of a score, which leave ties."""
    case = Case(2, 3, 16, 16)
    choice, codes, *_ = case.run("torch")
    first, stop = SINK, REQUESTS[0][1] - RECENT
    logits = scanned(case.query[0], codes, 0, SCALE)[..., first:stop].double()
    for head, row in enumerate(coarse(logits.softmax(-1).mean(1)).tolist()):
        order = sorted(range(len(row)), key=lambda j: (-row[j], j))[:BUDGET]
        assert choice.index_BHK[0, head].tolist() == [first + j for j in sorted(order)]
    assert choice.index_BHK[1, 0].tolist()[:19] == list(range(3, 22)), "no more keys than the budget"


def test_what_is_kept_of_a_logit_moves_a_key_only_at_the_edge_of_a_score(monkeypatch):
    """16 bits: a weight is known to within 2e-4; half precision keeps deep logits to 8e-3, which fails."""
    monkeypatch.setitem(globals(), "BUDGET", 400)
    case = Case(8, 2, 64, 16)
    choice, codes, *_ = case.run("triton")
    first, stop = SINK, REQUESTS[0][1] - RECENT
    weight_HT = scanned(case.query[0], codes, 0, SCALE)[..., first:stop].double().softmax(-1).mean(1)
    chosen_HT = torch.zeros_like(weight_HT, dtype=torch.bool).scatter_(
        1, choice.index_BHK[0].long() - first, value=True
    )
    least_H = coarse(weight_HT * (1 + 2e-4)).masked_fill(~chosen_HT, torch.inf).amin(1)
    assert (least_H >= coarse(weight_HT * (1 - 2e-4)).masked_fill(chosen_HT, 0.0).amax(1)).all()
    assert (chosen_HT.sum(1) == BUDGET).all()


@pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
def test_after_an_early_choice_the_pseudo_token_has_the_true_query_s_logit_of_the_mean_key(backend: str):
    """A query that was predicted but for what all keys have in common chooses and weighs as the true one."""
    case = Case(2, 3, 72, 40)
    basis_BHWCD = case.codes.query_BHWCD
    basis_BHWCD -= along(basis_BHWCD, case.codes.mean_BHD[:, :, None, None])
    wanted, true = case.run("torch")[0], case.query
    case.query = true + 3 * case.codes.mean_BHD[:, :, None]  # adds nothing to a channel
    on = case.on(kernel_device(backend))
    position, length = on.table.new_zeros(len(REQUESTS), 2, SINK + BUDGET), on.table.new_zeros(len(REQUESTS), 2)
    rows = on.key, on.value, on.table, on.step, on.codes
    choice = code_scan.on(backend)(on.query, *rows, position, length, budget=BUDGET, scale=SCALE, rest=REST, early=True)
    code_tokens.on(backend)(on.key, *rows[2:], true.to(on.query.device), choice.pseudo, SCALE)
    for row in (row for row, (mode, _) in enumerate(REQUESTS) if mode == FAST):
        assert torch.equal(choice.index_BHK[row].cpu(), wanted.index_BHK[row])
        torch.testing.assert_close(
            choice.pseudo.part()[1][row].cpu(), wanted.pseudo.part()[1][row], rtol=1e-4, atol=2e-3
        )


def along(x: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return (x * direction).sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True) * direction


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
def test_new_rows_are_appended_before_they_are_coded(backend: str, fast: bool):
    """In the launch that codes, also where no request is fast: the pages, norms and codes of rows that lay there."""
    case = Case(2, 2, 72, 40, torch.float16)
    late = case.on(kernel_device(backend)).late()
    if fast:
        _, codes, *_ = late.run(backend)
    else:
        codes = BatchCodes(*(part.clone() for part in late.codes))
        code_tokens.on(backend)(late.key, late.table, late.step, codes)
    assert torch.equal(late.key.cpu(), case.key)
    assert torch.equal(late.value.cpu(), case.value)
    assert torch.equal(codes.word_BHWT.cpu(), case.run("torch")[1].word_BHWT)
    for row, (mode, tokens) in enumerate(REQUESTS):
        if mode != IDLE:
            at = case.table[row, (tokens - 1) // PAGE], slice(None), (tokens - 1) % PAGE
            torch.testing.assert_close(late.norm.cpu()[at], case.key[at].float().norm(dim=-1))


@pytest.mark.parametrize("backend", ["torch", "triton", "numba"])
def test_sums_follow_the_window_step_by_step(backend: str):
    """A value enters the sum when it leaves the recent window, also where the step moved by several."""
    case = Case(1, 1, 16, 16)
    for tokens in (40, 41, 47):
        requests = ((FAST, tokens), *((IDLE, 0),) * 4)
        case.step = step_of(requests)
        choice, case.codes, *_ = case.run(backend)
        stop = tokens - RECENT
        values = case.value[case.table[0].long()].transpose(0, 1).flatten(1, 2)[:, SINK:stop]
        torch.testing.assert_close(choice.pseudo.value_BHE[0], values.mean(1))
