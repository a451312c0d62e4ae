"""A decoding step's attention in PyTorch, and its split plan (after FlashAttention-3's and FlashInfer's schedulers)."""

from typing import Any, NamedTuple

import torch

from sfi_kernels import step_descriptor as step
from sfi_kernels.dense_attention.reference import dense_attention, window_logits
from sfi_kernels.launch import target
from sfi_kernels.op import check_int32, check_pages, check_same, check_shapes
from sfi_kernels.pages import Ring, check_ring, flat_rows, read_pages, row_numbers
from sfi_kernels.partial_attention import PseudoToken, combine, partial_attention
from sfi_kernels.step_descriptor import StepDescriptor

MIN_UNITS, MAX_SPLITS = 2, 64
# In units: what a wave costs beyond its own. Reckoned, not measured: a unit of bfloat16 keys and values, of 128 numbers
# each, is 32 KB, 2 us at a program's share of 4.3 TB/s, two programs on each of 132 processors. A wave takes about 4 us
# more, for its last stores and for loads that wait for each other. Joining is cheap: half a KB a split, 1/64 of a unit.
OVERHEAD = 2
CANDIDATES = 8  # sizes of work items that are tried


class DecodeAttention(NamedTuple):
    """The result of a step's attention, in the query's dtype; zeros for padding and for an idle request.

    `logits_BHGWT` are those of the slow requests' last queries (W = 1), T the longest's length, float32: -inf for the
    sparse heads of a mixed request, undefined beyond a request's length; `log_sum_BHGW` is their log-sum-exp over J,
    -inf of nothing. Both are None without evidence.
    """

    out_BHGWE: torch.Tensor
    logits_BHGWT: torch.Tensor | None = None
    log_sum_BHGW: torch.Tensor | None = None


def work_items(batch: int, heads: int, programs: int) -> int:
    """Return the most work items a plan can have, however long the requests are."""
    return batch + -(-programs // heads)


def split_plan(descriptor: StepDescriptor, heads: int, programs: int) -> None:
    """Split every request's units into work items of about one size: the work list and the words FIRST and SPLITS.

    Slow requests come first, so that long work does not start last. Among a few sizes from the least that fills the
    processors, the one with the lowest cost in waves of work wins. Each of the KV `heads` runs every work item;
    `programs` run at once on the device. Raise `ValueError` for a descriptor with less room than `work_items` asks for.
    """
    check_room(descriptor, heads, programs)
    table, work = descriptor.table_BX, descriptor.work_XI
    words = table.long()
    packed = (words[:, step.PACKED] + step.UNIT - 1) // step.UNIT
    pages = (words[:, step.LENGTH] + step.UNIT - 1) // step.UNIT - words[:, step.START] // step.UNIT
    units = torch.where(words[:, step.MODE] < step.FAST, 0, packed + pages)
    total, most = int(units.sum()), int(units.max())
    least = max(MIN_UNITS, -(-11 * heads * total // (10 * programs)), -(-most // MAX_SPLITS))
    costs = []
    for extra in range(CANDIDATES):
        size = least + least * extra // CANDIDATES
        splits = (units + size - 1) // size
        waves = -(-int(splits.sum()) * heads // programs)
        costs.append((waves * (size + OVERHEAD), size))
    size = min(costs)[1]
    splits = (units + size - 1) // size
    slow = words[:, step.MODE] == step.SLOW
    first = torch.where(
        slow, (splits * slow).cumsum(0) - splits, (splits * slow).sum() + (splits * ~slow).cumsum(0) - splits
    )
    table[:, step.FIRST], table[:, step.SPLITS] = first.int(), splits.int()
    work[:] = torch.tensor([-1, 0, 0, 0], dtype=torch.int32, device=work.device)
    for row in range(descriptor.batch):
        share = -(-int(units[row]) // max(1, int(splits[row])))
        for split in range(int(splits[row])):
            begin = split * share
            item = [row, begin, min(share, int(units[row]) - begin), 0]
            work[int(first[row]) + split] = torch.tensor(item, dtype=torch.int32)


def check_room(descriptor: StepDescriptor, heads: int, programs: int) -> None:
    """Raise `ValueError` if a plan could overflow the descriptor."""
    have, need = descriptor.work_XI.shape[0], work_items(descriptor.batch, heads, programs)
    if have < need:
        raise ValueError(f"descriptor must have room for {need} work items, got {have}")


def resident_programs(device: torch.device) -> int:
    """Return how many programs of the attention run at once: two on each processor."""
    return 2 * target(device).processors


def decode_attention(
    query_BHGWD: torch.Tensor,
    packed_key_BHSD: torch.Tensor,
    packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    descriptor: StepDescriptor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
    evidence: bool = False,
    into: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dense_BH: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None,
    ring: Ring | None = None,
) -> DecodeAttention:
    """Attend with the last tokens of every request: fast ones sparsely, slow ones to their whole history.

    A slow request that verifies a draft has several queries, its last tokens; each sees the tokens up to its own. Any
    other decoding request has one. A request's own are the last of W; the others are padding and may hold anything.
    Row s of a packed segment counts where s < `packed_length_BH`. The segments' rows are those that the descriptor's
    SLOT names. `out` is a contiguous tensor for the output; None makes one.

    With `evidence` the result has the logits (Eq. 4) of the last query of each slow request, and their log-sum-exp over
    J, in a new tensor, or in `into`, a flat float32 buffer: the logits, then the sums. Paper gap: a step of the paper
    has one query.

    In a step with mixed requests `dense_BH`, int32, is 1 for their KV heads that read the whole history, 0 for those
    that read the packed segment and the recent pages. In another step `pseudo` is a term of the fast requests' softmax
    that stands for the unread keys, -inf for every other request, and `position_BHS` are positions of the packed rows,
    to read these in their pages: the packed keys and values may have no row then.

    With a `ring` the pages may be in host memory: sparse reads find the recent tokens in the ring.
    """
    check(query_BHGWD, packed_key_BHSD, packed_value_BHSE, packed_length_BH, key_PHND, value_PHNE,
          block_table_BP, descriptor, sink_HG, dense_BH, pseudo, position_BHS, ring, out)  # fmt: skip
    near = Ring(key_PHND, value_PHNE, block_table_BP) if ring is None else ring
    words = descriptor.table_BX
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    shape = *query_BHGWD.shape[:4], value_PHNE.shape[3]
    out = query_BHGWD.new_zeros(shape) if out is None else out.zero_()
    numbers = words[:, [step.MODE, step.MIXED, step.QUERIES, step.SLOT]].tolist()
    for row, (mode, mixed, queries, slot) in enumerate(numbers):
        request, seat = slice(row, row + 1), slice(slot, slot + 1)
        query, pages = query_BHGWD[request, :, :, -1], (key_PHND, value_PHNE, block_table_BP[request])
        length_B = words[request, step.LENGTH]
        recent = near.key_PHND, near.value_PHNE, near.block_table_BP[request]
        packed = packed_key_BHSD[seat], packed_value_BHSE[seat], packed_length_BH[seat]
        if mixed and dense_BH is not None:
            start_B = words[request, step.MIXED] - 1
            out[request, :, :, -1] = _mixed_heads(
                query, *packed, *pages, recent, start_B, length_B, dense_BH[row], sink_HG, options
            )
        elif mode == step.FAST:
            term = None if pseudo is None else pseudo.of(request)
            positions = None if position_BHS is None else position_BHS[seat]
            out[request, :, :, -1] = sparse_attention(
                query, *packed, *recent, words[request, step.START], length_B, **options, sink_HG=sink_HG,
                pseudo=term, position_BHS=positions,
            )  # fmt: skip
        elif mode == step.SLOW:
            several = query_BHGWD[request, :, :, -queries:]
            out[request, :, :, -queries:] = dense_attention(several, *pages, length_B, **options, sink_HG=sink_HG)
    if not evidence or not descriptor.slow:
        return DecodeAttention(out)
    logits, log_sum = _evidence(query_BHGWD, key_PHND, block_table_BP, descriptor, dense_BH, options)
    if into is not None:
        both = into[: logits.numel()], into[logits.numel() :][: log_sum.numel()]
        logits, log_sum = (room.view_as(part).copy_(part) for room, part in zip(both, (logits, log_sum), strict=True))
    return DecodeAttention(out, logits, log_sum)


def _evidence(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor,
    descriptor: StepDescriptor, dense_BH: torch.Tensor | None, options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    # of the slow requests: the logits of the last query each, and their log-sum-exp over J
    rows = torch.tensor(descriptor.slow)
    slow = descriptor.table_BX[rows]
    logits = window_logits(
        query_BHGWD[rows, :, :, -1:], key_PHND, block_table_BP[rows], slow[:, step.LENGTH],
        longest=int(slow[:, step.LENGTH].max()), **options,
    )  # fmt: skip
    position = torch.arange(logits.shape[-1], device=logits.device)
    allowed_RT = (position >= slow[:, step.ALLOWED_START, None]) & (position < slow[:, step.ALLOWED_STOP, None])
    if dense_BH is not None:
        is_sparse_RH = (slow[:, step.MIXED, None] != 0) & (dense_BH[rows] == 0)
        logits = logits.masked_fill(is_sparse_RH[:, :, None, None, None], -torch.inf)
    in_J = logits.masked_fill(~allowed_RT[:, None, None, None], -torch.inf)
    return logits, in_J.logsumexp(-1)


def _mixed_heads(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent: tuple[torch.Tensor, torch.Tensor, torch.Tensor], recent_start_B: torch.Tensor,
    length_B: torch.Tensor, dense_H: torch.Tensor, sink_HG: torch.Tensor | None, options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    # of one request; a head that reads everything has no packed rows and a recent segment that begins at 0
    packed_length_BH = packed_length_BH * (dense_H == 0)
    outs = []
    for head, dense in enumerate(dense_H.tolist()):
        chosen = slice(head, head + 1)
        key, value, table_BP = (key_PHND, value_PHNE, block_table_BP) if dense else recent
        out = sparse_attention(
            query_BHGD[:, chosen], packed_key_BHSD[:, chosen], packed_value_BHSE[:, chosen],
            packed_length_BH[:, chosen], key[:, chosen], value[:, chosen], table_BP,
            torch.zeros_like(recent_start_B) if dense else recent_start_B, length_B,
            **options, sink_HG=None if sink_HG is None else sink_HG[chosen],
        )  # fmt: skip
        outs.append(out)
    return torch.cat(outs, 1)


def sparse_attention(
    query_BHGD: torch.Tensor, packed_key_BHSD: torch.Tensor, packed_value_BHSE: torch.Tensor,
    packed_length_BH: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, recent_start_B: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
    position_BHS: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend to sink and selected tokens, packed or by position, and to the recent tokens, in the pages.

    Arguments as in `decode_attention`, but `recent_start_B`, the first position of the recent segment, where no packed
    token lies, and `length_B`, cached tokens, the query's own included; both int32. The output is [B, H, G, E].
    """
    if position_BHS is not None:
        packed_key_BHSD, packed_value_BHSE = (
            _rows(pages, position_BHS, block_table_BP) for pages in (key_PHND, value_PHNE)
        )
    packed = packed_length_BH.tolist()
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    if len({length for row in packed for length in row}) > 1 < len(packed):
        rows = [
            sparse_attention(
                query_BHGD[row], packed_key_BHSD[row], packed_value_BHSE[row], packed_length_BH[row], key_PHND,
                value_PHNE, block_table_BP[row], recent_start_B[row], length_B[row], **options, sink_HG=sink_HG,
                pseudo=None if pseudo is None else pseudo.of(row),
            )
            for row in (slice(b, b + 1) for b in range(len(packed)))
        ]  # fmt: skip
        return torch.cat(rows)
    query_BHG1D = query_BHGD[:, :, :, None]
    parts = []
    if most := max(packed[0]):
        key, value = packed_key_BHSD[:, :, :most], packed_value_BHSE[:, :, :most]
        counts = None
        if min(packed[0]) < most:
            counts = torch.arange(most, device=key.device) < packed_length_BH[:, :, None]
            # a row that does not count may hold anything, and 0 times NaN is NaN
            value = value.masked_fill(~counts[..., None], 0.0)
            counts = counts[:, :, None, None]
        parts.append(partial_attention(query_BHG1D, key, value, **options, visible_BHGWT=counts))
    recent = [
        partial_attention(
            query_BHG1D[row : row + 1],
            read_pages(key_PHND, block_table_BP[row], start, length),
            read_pages(value_PHNE, block_table_BP[row], start, length),
            **options,
        )
        for row, (start, length) in enumerate(zip(recent_start_B.tolist(), length_B.tolist(), strict=True))
    ]
    outs, log_sums = zip(*recent, strict=True)
    parts.append((torch.cat(outs), torch.cat(log_sums)))
    if pseudo is not None:
        parts.append(pseudo.part())
    return combine(parts, sink_HG)[:, :, :, 0].to(query_BHGD.dtype)


def _rows(pages_PHND: torch.Tensor, position_BHS: torch.Tensor, block_table_BP: torch.Tensor) -> torch.Tensor:
    rows_XD, steps = flat_rows(pages_PHND)
    row_BX = row_numbers(position_BHS, block_table_BP, pages_PHND.shape[2], steps)
    return rows_XD[row_BX].view(*position_BHS.shape, -1)


def check(
    query: torch.Tensor, packed_key: torch.Tensor, packed_value: torch.Tensor,
    packed_length: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_table: torch.Tensor,
    descriptor: StepDescriptor, sink: torch.Tensor | None, dense: torch.Tensor | None = None,
    pseudo: PseudoToken | None = None, position: torch.Tensor | None = None, ring: Ring | None = None,
    out: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise the errors of `decode_attention`."""
    if ring is not None:
        check_ring(ring, key, value, block_table)
    names = "query BHGWD, key PHND, value PHNE, packed_key ZHSD, packed_value ZHSE, packed_length ZH, block_table Bp"
    packed = packed_key, packed_value, packed_length
    check_shapes(names, query, key, value, *packed, block_table, B=descriptor.batch)
    B, H, G, W, _ = query.shape
    if descriptor.queries > W:
        raise ValueError(f"query must have W >= {descriptor.queries}, got {list(query.shape)}")
    if sink is not None:
        check_shapes("sink HG", sink, H=H, G=G)
    if pseudo is not None:
        parts = "X"[: pseudo.logit_BHG.dim() - 3]
        check_shapes(f"pseudo logit BHG{parts}, pseudo value BHE", *pseudo, B=B, H=H, G=G, E=value.shape[3])
    check_same(query, "query", packed_key=packed_key, packed_value=packed_value)
    check_out(out, query, value)
    check_pages(query, "query", key=key, value=value)
    numbers = {"packed_length": packed_length, "block_table": block_table}
    check_int32(query.device, **numbers, descriptor=descriptor.buffer)
    for name, letters, marks in (("dense", "BH", dense), ("position", "ZHS", position)):
        if marks is not None:
            check_shapes(f"{name} {letters}", marks, B=B, Z=len(packed_length), H=H)
            check_int32(query.device, **{name: marks})
    if descriptor.mixed is not None and bool(descriptor.mixed) != (dense is not None):
        rule = "must be given for" if dense is None else "must be None without"
        got = f"rows {descriptor.mixed}" if dense is None else f"a tensor of {list(dense.shape)}"
        raise ValueError(f"dense {rule} mixed requests, got {got}")
    for name, other in (("pseudo", pseudo), ("position", position)):
        if other is not None and dense is not None:
            raise ValueError(f"{name} must be None in a step with mixed requests, got both")


def check_out(out: torch.Tensor | None, query: torch.Tensor, value: torch.Tensor) -> None:
    """Raise the errors of `decode_attention` for an output that was given."""
    if out is not None:
        check_shapes("query BHGWD, value PHNE, out BHGWE", query, value, out)
        check_same(query, "query", out=out)
