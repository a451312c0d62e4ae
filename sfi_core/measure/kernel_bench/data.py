"""The random inputs of the benchmark: one layer of a decoding step."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.settings.engine import PAGE_SIZE
from sfi_core.settings.parts import SelectorConfig
from sfi_core.state.layer_pages import LayerPages
from sfi_kernels.decode_attention import resident_programs
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.selector import selector
from sfi_kernels.split_plan import split_plan, work_items
from sfi_kernels.step_descriptor import StepDescriptor, StepRequest, describe_step

# standard deviation of the logits: attention rests on some thirty tokens of 16K, so that a missing token
# shows in the output; with queries of unit length the output would be almost the mean over all tokens
PEAKEDNESS = 2.5


@dataclass(frozen=True, slots=True)
class LayerData:
    """A layer's cache and one step's query for every request.

    Attributes:
        key_BHTD: Keys, contiguous, as SDPA reads them.
        pages: The same rows in pages; several pages of a request are in a shuffled order.
        length_B: Cached tokens, int32.
        recent_start_B: First token of the recent segment, int32.
    """

    query_BHGD: torch.Tensor
    key_BHTD: torch.Tensor
    value_BHTD: torch.Tensor
    pages: LayerPages
    block_table_BP: torch.Tensor
    length_B: torch.Tensor
    recent_start_B: torch.Tensor

    @property
    def nothing(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Packed rows of a slow step, which reads none."""
        row = self.key_BHTD[:, :, :1].contiguous()
        return row, row, self.length_B.new_zeros(row.shape[:2])

    @property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and block table, as the ops take them."""
        return self.pages.key_PHND, self.pages.value_PHNE, self.block_table_BP


@dataclass(frozen=True, slots=True)
class Selected:
    """The selection of a retention: random positions of J, and a segment for their rows.

    The segment holds poison until `pack` has run.

    Attributes:
        index_BHK: The selected positions, ascending, int32.
        position_BHS: Positions of the packed rows, int32.
        length_BH: Packed rows, int32.
    """

    index_BHK: torch.Tensor
    key_BHSD: torch.Tensor
    value_BHSD: torch.Tensor
    position_BHS: torch.Tensor
    length_BH: torch.Tensor

    @property
    def segment(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The packed segment, as `pack` takes it."""
        return self.key_BHSD, self.value_BHSD, self.position_BHS, self.length_BH

    def empty_like(self) -> "Selected":
        """Return the same positions with a new, poisoned segment."""
        made = Selected(self.index_BHK, *(torch.empty_like(part) for part in self.segment))
        made.poison()
        return made

    def poison(self) -> None:
        """Fill the segment with values that no packed row has."""
        self.key_BHSD.fill_(torch.nan)
        self.value_BHSD.fill_(torch.nan)
        self.position_BHS.fill_(-7)
        self.length_BH.zero_()


def layer_data(settings: KernelSettings, device: torch.device, *, one_page: bool) -> LayerData:
    """Draw a layer's cache and queries."""
    generator = torch.Generator(device).manual_seed(settings.seed)
    options: dict[str, Any] = {"dtype": settings.torch_dtype, "device": device}
    B, H, T, D = settings.batch, settings.kv_heads, settings.context, settings.head_dim
    key = torch.randn(B, H, T, D, generator=generator, **options)
    value = torch.randn(B, H, T, D, generator=generator, **options)
    query = torch.randn(B, H, settings.group, D, generator=generator, **options) * PEAKEDNESS
    pages, table = _pages(key, value, T if one_page else PAGE_SIZE, generator)
    whole = torch.full((B,), T, dtype=torch.int32, device=device)
    return LayerData(query, key, value, pages, table, whole, whole - settings.recent)


def draw_queries(settings: KernelSettings, batch: int, count: int, device: torch.device, *, seed: int) -> torch.Tensor:
    """Draw `count` queries of each request, [B, H, G, W, D]; `seed` is added to the settings' seed."""
    generator = torch.Generator(device).manual_seed(settings.seed + seed)
    sizes = batch, settings.kv_heads, settings.group, count, settings.head_dim
    query = torch.randn(sizes, generator=generator, dtype=settings.torch_dtype, device=device)
    return query * PEAKEDNESS


def _pages(
    key: torch.Tensor, value: torch.Tensor, page_size: int, generator: torch.Generator
) -> tuple[LayerPages, torch.Tensor]:
    B, H, T, _ = key.shape
    norm = torch.stack([torch.linalg.vector_norm(row.float(), dim=-1) for row in key])
    per_request = -(-T // page_size)
    if per_request == 1 and page_size == T:  # the contiguous cache is its own page
        table = torch.arange(B, dtype=torch.int32, device=key.device).view(B, 1)
        return LayerPages(key, value, norm), table
    order = torch.randperm(B * per_request, generator=generator, device=key.device)
    table = order.view(B, per_request)
    paged = []
    for rows in (key, value, norm):
        pages = rows.new_empty(B * per_request, H, page_size, *rows.shape[3:])
        for first in range(0, per_request * page_size, page_size):
            part = rows[:, :, first : first + page_size]
            pages[table[:, first // page_size], :, : part.shape[2]] = part
        paged.append(pages)
    return LayerPages(*paged), table.int()


def select(settings: KernelSettings, data: LayerData, retention: float) -> Selected:
    """Draw the selected positions of a retention."""
    K, device = settings.budget(retention), data.query_BHGD.device
    B, H, T = settings.batch, settings.kv_heads, settings.context
    generator = torch.Generator(device).manual_seed(settings.seed + 1)
    draw = torch.rand(B, H, T - settings.recent - settings.sink, device=device, generator=generator)
    index = draw.topk(K, sorted=False).indices.sort().values + settings.sink
    S, D = settings.sink + K, settings.head_dim
    key, value = data.key_BHTD.new_empty(B, H, S, D), data.value_BHTD.new_empty(B, H, S, D)
    position, length = index.new_empty(B, H, S, dtype=torch.int32), index.new_empty(B, H).int()
    selected = Selected(index.int(), key, value, position, length)
    selected.poison()
    return selected


def step_plan(
    settings: KernelSettings, backend: str, device: torch.device, *, programs: int | None = None, **request: Any
) -> StepDescriptor:
    """Plan a step of `settings.batch` equal requests; planning is not timed, as a plan serves all layers.

    Args:
        settings: The shape.
        backend: "torch" or "triton".
        device: The device of the plan.
        programs: Programs that share the work; None for as many as the device runs at once.
        **request: Fields of `StepRequest`, besides the lengths and the sink.
    """
    made = StepRequest(
        length=settings.context, recent_start=settings.context - settings.recent, sink=settings.sink, **request
    )
    programs = resident_programs(device) if programs is None else programs
    room = work_items(settings.batch, settings.kv_heads, programs)
    plan = describe_step([made] * settings.batch, room, device)
    split_plan.on(backend)(plan, settings.kv_heads, programs)
    return plan


def evidence_logits(settings: KernelSettings, data: LayerData) -> torch.Tensor:
    """Return the step's logits, [B, H, G, 1, T] float32, the Selector's evidence."""
    query = data.query_BHGD[:, :, :, None]
    key, _, table = data.paged
    return window_logits.reference(query, key, table, data.length_B, scale=settings.scale)


def allowed(settings: KernelSettings, data: LayerData) -> torch.Tensor:
    """Return the candidate set J, [B, T] bool."""
    position = torch.arange(settings.context, device=data.length_B.device)
    inside = (position >= settings.sink) & (position < settings.context - settings.recent)
    return inside.expand(settings.batch, -1).contiguous()


def scores(settings: KernelSettings, data: LayerData, logits: torch.Tensor) -> torch.Tensor:
    """Return the reference's scores, [B, H, T], the input of Top-K."""
    options = asdict(SelectorConfig())
    rows = []
    for row in range(settings.batch):  # a request at a time, to keep temporary tensors small
        one = slice(row, row + 1)
        norm = norms(settings, data)[one]
        rows.append(selector.reference(logits[one], norm, allowed(settings, data)[one], **options)[0])
    return torch.cat(rows)


def norms(settings: KernelSettings, data: LayerData) -> torch.Tensor:
    """Return the key norms, [B, H, T] float32."""
    if data.pages.norm_PHN.shape[2] == settings.context:
        return data.pages.norm_PHN
    return torch.stack([torch.linalg.vector_norm(row.float(), dim=-1) for row in data.key_BHTD])
