"""The random inputs of the benchmark: one layer of a decoding step, and what its ops take of it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

import torch

from sfi_core.measure.kernel_bench import gates
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.settings.config import SelectorConfig
from sfi_core.settings.engine import PAGE_SIZE
from sfi_core.state.layer_pages import LayerPages
from sfi_kernels.decode_attention import DecodeAttention, decode_attention, resident_programs, split_plan, work_items
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.pack import pack
from sfi_kernels.pages import Ring
from sfi_kernels.selector import selector
from sfi_kernels.step_descriptor import StepDescriptor, StepRequest, describe_step

# standard deviation of the logits: attention rests on some thirty tokens of 16K, so that a missing token
# shows in the output; with queries of unit length the output would be almost the mean over all tokens
PEAKEDNESS = 2.5
RING = 2  # pages of a request's ring
SELECTOR = SelectorConfig()


class Selected(NamedTuple):
    """The selection of a retention: random positions of J, ascending, and a segment for their rows."""

    index_BHK: torch.Tensor
    key_BHSD: torch.Tensor
    value_BHSD: torch.Tensor
    position_BHS: torch.Tensor
    length_BH: torch.Tensor

    @property
    def segment(self) -> tuple[torch.Tensor, ...]:
        """The packed segment, as `pack` takes it."""
        return self[1:]

    @property
    def packed(self) -> tuple[torch.Tensor, ...]:
        """Keys, values and lengths of the segment, as attention takes them."""
        return self.key_BHSD, self.value_BHSD, self.length_BH

    def empty_like(self) -> "Selected":
        """Return the same positions with a new, poisoned segment."""
        selected = Selected(self.index_BHK, *(torch.empty_like(part) for part in self.segment))
        selected.poison()
        return selected

    def poison(self) -> None:
        """Fill the segment with values that no packed row has."""
        for part, value in zip(self.segment, (torch.nan, torch.nan, -7, 0), strict=True):
            part.fill_(value)


class LayerData:
    """A layer's cache and one step's query for every request.

    Keys and values are contiguous, as SDPA reads them, and the same rows in `pages`; several pages of a request are in
    a shuffled order. `nothing` are the packed rows of a slow step, `notes` remarks that the rows of results need.
    """

    def __init__(self, settings: KernelSettings, backend: str, device: torch.device) -> None:
        self.settings, self.backend, self.device = settings, backend, device
        self.notes: list[str] = []
        self._generator = torch.Generator(device).manual_seed(settings.seed)
        B, H, T, D = settings.batch, settings.kv_heads, settings.context, settings.head_dim
        self.key_BHTD, self.value_BHTD = self.draw(B, H, T, D), self.draw(B, H, T, D)
        self.query_BHGD = self.draw_queries(B, 1)[:, :, :, 0]
        self.request_B = torch.arange(B, dtype=torch.int32, device=device)
        self.sink_B, self.length_B = (torch.full_like(self.request_B, count) for count in (settings.sink, T))
        self.recent_start_B = self.length_B - settings.recent
        self.pages, self.block_table_BP = self._paged(T if backend == "torch" else PAGE_SIZE)
        row = self.key_BHTD[:, :, :1].contiguous()
        self.nothing = row, row, self.length_B.new_zeros(B, H)

    def draw(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draw normal numbers, in the settings' dtype unless another is given."""
        dtype = dtype or getattr(torch, self.settings.dtype_name)
        return torch.randn(sizes, generator=self._generator, dtype=dtype, device=self.device)

    def draw_queries(self, batch: int, count: int) -> torch.Tensor:
        """Draw `count` queries of each request, [B, H, G, W, D]."""
        settings = self.settings
        return self.draw(batch, settings.kv_heads, settings.group, count, settings.head_dim) * PEAKEDNESS

    def _paged(self, page_size: int) -> tuple[LayerPages, torch.Tensor]:
        B, H, T, _ = self.key_BHTD.shape
        rows = (self.key_BHTD, self.value_BHTD, self.norm_BHT)
        per_request = -(-T // page_size)
        if page_size == T:  # the contiguous cache is its own page
            return LayerPages(*rows), self.request_B[:, None]
        table = torch.randperm(B * per_request, generator=self._generator, device=self.device).view(B, per_request)
        paged = []
        for whole in rows:
            pages = whole.new_empty(B * per_request, H, page_size, *whole.shape[3:])
            for page, part in enumerate(torch.split(whole, page_size, 2)):
                pages[table[:, page], :, : part.shape[2]] = part
            paged.append(pages)
        return LayerPages(*paged), table.int()

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and block table, as the ops take them."""
        return self.pages.key_PHND, self.pages.value_PHNE, self.block_table_BP

    @cached_property
    def hosted(self) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Ring]:
        """The pages in host memory, pinned for a GPU, as `paged`; and a ring of two pages a request for steps."""
        pages = [x.cpu().pin_memory() if x.is_cuda else x.clone() for x in (self.pages.key_PHND, self.pages.value_PHNE)]
        B, count = self.block_table_BP.shape
        page_P = torch.arange(count, device=self.device)
        table_BP = (self.request_B[:, None] * RING + page_P % RING).int()
        near = [x.new_empty(B * RING, *x.shape[1:]) for x in (self.pages.key_PHND, self.pages.value_PHNE)]
        return (pages[0], pages[1], self.block_table_BP), Ring(near[0], near[1], table_BP)

    @cached_property
    def norm_BHT(self) -> torch.Tensor:
        """The key norms, float32."""
        return torch.stack([torch.linalg.vector_norm(row.float(), dim=-1) for row in self.key_BHTD])

    @cached_property
    def allowed_BT(self) -> torch.Tensor:
        """The candidate set J, bool."""
        inside_BT = torch.zeros(self.settings.batch, self.settings.context, dtype=torch.bool, device=self.device)
        inside_BT[:, self.settings.sink : -self.settings.recent or None] = True
        return inside_BT

    def logits(self, query_BHGWD: torch.Tensor) -> torch.Tensor:
        """Return the reference's logits of queries, [B, H, G, W, T] float32, the Selector's evidence."""
        key, _, table = self.paged
        return window_logits.reference(query_BHGWD, key, table, self.length_B, scale=self.settings.scale)

    @cached_property
    def evidence_BHGWT(self) -> torch.Tensor:
        """The logits of the step's query."""
        return self.logits(self.query_BHGD[:, :, :, None])

    @cached_property
    def score_BHT(self) -> torch.Tensor:
        """The reference's scores, the input of Top-K; a request at a time, to keep temporary tensors small."""
        inputs = self.evidence_BHGWT, self.norm_BHT, self.allowed_BT
        rows = zip(*(torch.split(part, 1) for part in inputs), strict=True)
        return torch.cat([selector.reference(*row, **asdict(SELECTOR))[0] for row in rows])

    @cached_property
    def selected(self) -> dict[float, Selected]:
        """The packed selection of every retention."""
        return {retention: self.select(retention) for retention in self.settings.retentions}

    def select(self, retention: float) -> Selected:
        """Draw the selected positions of a retention, and pack their rows by the reference."""
        settings = self.settings
        K, B, H, T = settings.budget(retention), settings.batch, settings.kv_heads, settings.context
        candidates = T - settings.recent - settings.sink
        draw = torch.rand(B, H, candidates, device=self.device, generator=self._generator)
        index = (draw.topk(K, sorted=False).indices.sort().values + settings.sink).int()
        shape = B, H, settings.sink + K, settings.head_dim
        segment = self.key_BHTD.new_empty(shape), self.key_BHTD.new_empty(shape), index.new_empty(shape[:3])
        selected = Selected(index, *segment, index.new_empty(B, H))
        pack.reference(*self.pack_operands(selected))
        return selected

    def pack_operands(self, selected: Selected) -> tuple[torch.Tensor, ...]:
        """Return the operands of `pack`."""
        return *self.paged, self.request_B, selected.index_BHK, self.sink_B, *selected.segment

    def packed_index(self, selected: Selected, *, recent: bool = False) -> torch.Tensor:
        """Return the positions of the packed rows, with `recent` those that a fast step reads."""
        settings, index_BHK = self.settings, selected.index_BHK
        start = settings.context - settings.recent if recent else settings.context
        ends = torch.arange(settings.sink), torch.arange(start, settings.context)
        first, last = (end.to(index_BHK).expand(*index_BHK.shape[:2], -1) for end in ends)
        return torch.cat([first, index_BHK, last], 2)

    def plan(self, *, programs: int | None = None, **fields: Any) -> StepDescriptor:
        """Plan a step of equal requests, with fields of `StepRequest`; it is not timed, as a plan serves all layers."""
        settings, start = self.settings, self.settings.context - self.settings.recent
        request = StepRequest(length=settings.context, recent_start=start, sink=settings.sink, **fields)
        programs = resident_programs(self.device) if programs is None else programs
        room = work_items(settings.batch, settings.kv_heads, programs)
        plan = describe_step([request] * settings.batch, room, self.device)
        split_plan.on(self.backend)(plan, settings.kv_heads, programs)
        return plan

    def attend(
        self, plan: StepDescriptor, *packed: torch.Tensor, query_BHGWD: torch.Tensor | None = None,
        hosted: bool = False, **options: Any,
    ) -> DecodeAttention:  # fmt: skip
        """Run a step's attention: over `packed` rows, by default none, for the step's or for other queries."""
        query_BHGWD = self.query_BHGD[:, :, :, None] if query_BHGWD is None else query_BHGWD
        pages, ring = self.hosted if hosted else (self.paged, None)
        operands: tuple[Any, ...] = (*(packed or self.nothing), *pages, plan)
        options |= {"ring": ring}
        return decode_attention.on(self.backend)(query_BHGWD, *operands, scale=self.settings.scale, **options)

    def attended(self, *operands: Any, **options: Any) -> Callable[[], torch.Tensor]:
        """Return a call of `attend` for the first query's output, [B, H, G, D]."""
        return lambda: self.attend(*operands, **options).out_BHGWE[:, :, :, 0]

    def textbook(
        self, index_BHS: torch.Tensor | None = None, *, query: torch.Tensor | None = None, tokens: int | None = None
    ) -> gates.Expected:
        """Attend by the formula to positions `index_BHS` or the first `tokens`; `query` may be of fewer requests."""
        query = self.query_BHGD if query is None else query
        key, value = (x[: len(query), :, :tokens] for x in (self.key_BHTD, self.value_BHTD))
        return gates.textbook(query, key, value, self.settings.scale, index_BHS)

    def causal_error(
        self, out: torch.Tensor, query: torch.Tensor, at: Iterable[int], tokens: int, *, rival: bool = False
    ) -> float:
        """Compare the outputs of the queries `at`, of W queries [B, H, G, W, D] at the end of `tokens` tokens."""
        W, worst = query.shape[3], gates.EXACT
        for w in at:
            expected = self.textbook(query=query[:, :, :, w], tokens=tokens - W + w + 1)
            worst = max(worst, expected.error(out[:, :, :, w], rival=rival))
        return worst
