"""Stand-ins for the parts a test does not want, and the plain computations that tests compare with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from sfi_core.observers import events
from sfi_core.observers.observer import NullObserver
from sfi_core.policies.base import LayerContext
from sfi_core.state.request import RequestState
from sfi_kernels.code_scan import code_scan, code_tokens
from sfi_kernels.decode_attention import DecodeAttention, decode_attention, sparse_attention, split_plan
from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.pack import append, pack, recall
from sfi_kernels.selector import selector
from sfi_kernels.top_k import top_k


def tokens(result) -> list[list[int]]:
    """Return the generated token ids of each request of a result."""
    return [request.token_ids for request in result.report.requests]


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def positions(index_HK: torch.Tensor) -> list[list[int]]:
    """Return each head's; a batch pads them to its longest request's number."""
    return [[position for position in head if position >= 0] for head in index_HK.tolist()]


def break_logits(model, when: Callable[[], bool], row=slice(None)):
    """Make the logits NaN for as long as `when()` holds; returns the hook, which is a context."""

    def replace(module, args, output: torch.Tensor) -> torch.Tensor:
        if when():
            output = output.clone()
            output[row] = torch.nan
        return output

    return model.lm_head.register_forward_hook(replace)


def layer_context(logits: torch.Tensor, **fields) -> LayerContext:
    """Return what a layer shows a policy; what a test does not name is empty or fails when asked for."""
    shape = (1, logits.shape[1], logits.shape[-1])
    empty = torch.empty(0)

    def unexpected(*_):
        raise AssertionError("the policy looks at what the test does not show")

    shown = {
        "layer": 0, "backend": "torch", "key_norm_BHT": torch.ones(shape), "logits": lambda: logits,
        "states": (RequestState(),), "query_BHGWD": empty, "keys": unexpected, "values": unexpected,
        "notes": ({},), "scale": 1.0,
    }  # fmt: skip
    return LayerContext(**{**shown, **fields})


def coarse(weight: torch.Tensor) -> torch.Tensor:
    """Round probabilities, float64, down to eighths of their power of two; 2^-32 is the least."""
    weight = weight.clamp_min(2.0**-32)
    power = weight.log2().floor().exp2()
    return ((weight / power * 8).floor() * power).clamp_max(15 / 2)  # 1 is no score of its own


KEPT = {  # where the observer below keeps events
    events.RunEvent: "runs", events.PromptEvent: "prompts", events.BeginStepEvent: "begun", events.StepEvent: "steps",
    events.VerificationEvent: "verifications", events.SelectionEvent: "selections", events.RecallEvent: "recalls",
    events.AuditEvent: "audits", events.LogitsEvent: "logits",
}  # fmt: skip


class RecordingObserver(NullObserver):
    """Keeps every event and span, in order."""

    def __init__(self) -> None:
        vars(self).update({name: [] for name in KEPT.values()})
        self.spans: list[tuple[str, int | None]] = []
        self.open = 0

    def on(self, event) -> None:
        vars(self)[KEPT[type(event)]].append(event)

    @contextmanager
    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> Iterator[None]:
        self.spans.append((name, layer))
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Listener(RecordingObserver):
    """Hears events, but no spans, which a replay or layers that select together have none of."""

    span = NullObserver.span


def plain_attention(
    query_BHGWD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTE: torch.Tensor,
    scale: float,
    *,
    visible: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in float64 where `visible`: out, [B, H, G, W, E], zeros where a query sees nothing, and log-sum-exp."""
    query, key, value = query_BHGWD.double(), key_BHTD.double(), value_BHTE.double()
    logits = torch.einsum("bhgwd,bhtd->bhgwt", query, key) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    weight = logits.exp()
    if visible is not None:
        weight = weight * visible
    total = weight.sum(-1)
    whole = total if sink_HG is None else total + sink_HG.double().exp()[:, :, None]
    share = torch.where(whole > 0, 1 / whole, 0.0).unsqueeze(-1) * weight
    return torch.einsum("bhgwt,bhte->bhgwe", share, value), total.log()


def causal_mask(W: int, T: int) -> torch.Tensor:
    """Say which of T keys each of the last W queries sees, [W, T]."""
    return torch.arange(T) <= torch.arange(T - W, T)[:, None]


def error_bound(
    query_BHGWD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, scale: float
) -> tuple[float, float]:
    """Bound the error of attention on these very inputs: of the output, and of the log-sum-exp.

    A float32 dot product of D terms is off by at most D + 2 roundings of the sum of its terms' sizes, and a
    softmax weight by twice what its logits are. The output is a mean of values, so it is off by no more
    than the weights' relative error times the largest value, plus two roundings in the inputs' own precision:
    one of the weights, which a low-precision product takes, one of the result. The log-sum-exp of
    low-precision inputs may be off by a rounding of theirs: PyTorch's kernel takes a short exponential there,
    and what it weighs is rounded anyway.
    """
    sizes = torch.einsum("bhgwd,bhtd->bhgwt", query_BHGWD.double().abs(), key_BHTD.double().abs())
    rounding = torch.finfo(torch.float32).eps
    logit = float(sizes.max()) * scale * (key_BHTD.shape[-1] + 2) * rounding
    input_rounding = torch.finfo(query_BHGWD.dtype).eps
    lse = logit + 8 * rounding * (1 + float(sizes.max()) * scale)
    out = float(value_BHTE.double().abs().max()) * (2 * logit + 2 * input_rounding + 8 * rounding)
    return out, lse if input_rounding == rounding else lse + input_rounding


def paged(rows: Sequence[torch.Tensor], page_size: int, spare_pages: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Store `[H, T, ...]` of different T in shuffled pages, the rest NaN: pages and block table."""
    per_request = max(-(-row.shape[1] // page_size) for row in rows) + spare_pages
    H, *rest = rows[0].shape[0], *rows[0].shape[2:]
    count = per_request * len(rows)
    pages = torch.full((count, H, page_size, *rest), torch.nan, dtype=rows[0].dtype)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(count)).int()
    table_BP = table.view(len(rows), per_request)
    for row, page_numbers in zip(rows, table_BP.tolist(), strict=True):
        for slot, start in enumerate(range(0, row.shape[1], page_size)):
            part = row[:, start : start + page_size]
            pages[page_numbers[slot], :, : part.shape[1]] = part
    return pages, table_BP


def kernel_device(backend: str, dtype: torch.dtype = torch.float32, page_size: int = 16) -> str:
    """Say where to test a backend's op, and skip what its kernels refuse."""
    if backend in ("torch", "numba"):
        return "cpu"
    if page_size % 16:
        pytest.skip("the kernels refuse pages that hold no whole tiles")
    if torch.cuda.is_available():
        return "cuda"
    if dtype == torch.bfloat16:
        pytest.skip("bfloat16 is wrong in Triton's interpreter")
    return "cpu"


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the triton backend run the kernels' references, but for codes of keys, which differ by backend."""
    for op in (
        append, code_scan, code_tokens, decode_attention, dense_attention, pack, recall, selector,
        sparse_attention, split_plan, top_k, window_logits,
    ):  # fmt: skip
        monkeypatch.setitem(op.__dict__, "triton", op.reference)
    monkeypatch.setitem(decode_attention.__dict__, "triton", _attention_with_undefined_logits)


def _attention_with_undefined_logits(*args, **options) -> DecodeAttention:
    # the kernel leaves what lies behind a shorter request's last token as it was
    result, step = decode_attention.reference(*args, **options), args[7]
    if result.logits_BHGWT is not None:
        for logits, row in zip(result.logits_BHGWT, step.slow, strict=True):
            logits[..., int(step.length_B[row]) :] = torch.nan
    return result
