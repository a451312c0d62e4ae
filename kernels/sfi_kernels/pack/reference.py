"""Appending to the cache, packing (Reorg, Sec. 4) and recall (FreeKV, Sec. 4.2; SyncKV, Eq. 7) in PyTorch."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch.nn.functional import pad

from sfi_kernels.op import check_int32, check_pages, check_same, check_shapes
from sfi_kernels.pages import Ring, check_ring, flat_rows, row_numbers

# of a layer: key_PHND, value_PHNE, key_BHSD, value_BHSE, position_BHS, length_BH
Segment = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def append(
    key_BHTD: torch.Tensor,
    value_BHTE: torch.Tensor,
    start_B: torch.Tensor,
    count_B: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    norm_PHN: torch.Tensor,
    block_table_BP: torch.Tensor,
    *,
    ring: Ring | None = None,
) -> None:
    """Write each request's new tokens in place: keys, values and the keys' float32 norms.

    A request's new keys and values are the last `count` of T, in the pages' dtype, with a last stride of 1; 0 leaves it
    unchanged. `start_B` is the position of its first one. The block table has room for all. With a `ring` the pages may
    be in host memory, the norms on the device; keys and values go to both, and of a piece that is longer than the ring
    the last ones go there.
    """
    check_append(key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP, ring=ring)
    norm_BHT = torch.linalg.vector_norm(key_BHTD, dim=-1, dtype=torch.float32)
    news, pages = (key_BHTD, value_BHTE, norm_BHT), (key_PHND, value_PHNE, norm_PHN)
    starts, counts = start_B.tolist(), count_B.tolist()
    _write(news, pages, block_table_BP, starts, counts)
    if ring is not None:
        lasts = [min(count, ring_room(ring)) for count in counts]
        starts = [start + count - last for start, count, last in zip(starts, counts, lasts, strict=True)]
        _write(news[:2], ring[:2], ring.block_table_BP, starts, lasts)
    if ring is not None and ring.heads is not None:
        kept = ring.heads.place_H.argsort()[-ring.heads.key_PRND.shape[1] :]
        _write([x[:, kept] for x in news[:2]], ring.heads[1:], block_table_BP, start_B.tolist(), counts)


def _write(
    news: Sequence[torch.Tensor], pages: Sequence[torch.Tensor], block_table_BP: torch.Tensor,
    starts: Sequence[int], counts: Sequence[int],
) -> None:  # fmt: skip
    (T, N), tables = (news[0].shape[2], pages[0].shape[2]), block_table_BP.tolist()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        token = first = T - count
        while token < T:  # page by page
            slot, offset = divmod(start + token - first, N)
            size = min(T - token, N - offset)
            page, to, part = tables[row][slot], slice(offset, offset + size), slice(token, token + size)
            for new, target in zip(news, pages, strict=True):
                target[page, :, to] = new[row, :, part]
            token += size


def ring_room(ring: Ring) -> int:
    """Return the tokens of a request that a ring holds."""
    return len(ring.key_PHND) // len(ring.block_table_BP) * ring.key_PHND.shape[2]


def check_append(*operands: torch.Tensor, ring: Ring | None = None) -> None:
    """Raise the errors of `append`, given its arguments."""
    key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP = operands
    names = "key BHTD, value BHTE, start B, count B, key_pages PHND, value_pages PHNE, norm PHN, block_table Bp"
    check_shapes(names, *operands)
    check_pages(key_BHTD, "key", key_pages=key_PHND)
    check_pages(value_BHTE, "value", value_pages=value_PHNE)
    check_int32(key_BHTD.device, start=start_B, count=count_B, block_table=block_table_BP)
    if norm_PHN.dtype != torch.float32 or not norm_PHN.is_contiguous():
        raise ValueError(f"norm must be contiguous float32, got {norm_PHN.dtype} with strides {norm_PHN.stride()}")
    if ring is not None:
        check_ring(ring, key_PHND, value_PHNE, block_table_BP)
    for name, new in (("key", key_BHTD), ("value", value_BHTE)):
        if new.stride(3) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got {new.stride(3)}")


def pack(
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    request_R: torch.Tensor,
    index_RHK: torch.Tensor,
    sink_R: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSE: torch.Tensor,
    position_BHS: torch.Tensor,
    length_BH: torch.Tensor,
    *,
    heads_RH: torch.Tensor | None = None,
) -> None:
    """Rewrite the packed segments of R requests, in place: the sinks, then the selected tokens.

    `request_R` are the requests, each once; -1 for a row without a request. `index_RHK` are the positions to pack
    behind the sinks, padded with -1 at the end; sinks are positions 0 to `sink_R` - 1, of which at most S - K fit, and
    further ones are cut off. Packed keys and values beyond a request's length are undefined, their positions are padded
    with -1, and `length_BH` counts the rows. A KV head whose `heads_RH` is 0 keeps its rows, positions and length; None
    packs every head. All tensors but the pages are contiguous.
    """
    segment = key_BHSD, value_BHSE, position_BHS, length_BH
    check(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, segment, heads_RH)
    refreshed_RH = index_RHK.new_ones(index_RHK.shape[:2]) if heads_RH is None else heads_RH
    real_R = request_R >= 0
    if not real_R.all():
        request_R, index_RHK, sink_R = request_R[real_R], index_RHK[real_R], sink_R[real_R]
        refreshed_RH = refreshed_RH[real_R]
    (_, H, _), S = index_RHK.shape, key_BHSD.shape[2]
    request = request_R.long()
    position_RHS = packed_positions(index_RHK, sink_R, S)
    length_RH = (position_RHS >= 0).sum(2, dtype=torch.int32)
    packs_RH = refreshed_RH != 0
    position_BHS[request] = torch.where(packs_RH[..., None], position_RHS, position_BHS[request])
    length_BH[request] = torch.where(packs_RH, length_RH, length_BH[request])

    # computed once for all pages of the same steps
    table_RP = block_table_BP[request]
    numbers = cache(partial(row_numbers, position_RHS, table_RP, key_PHND.shape[2]))
    for pages, packed in ((key_PHND, key_BHSD), (value_PHNE, value_BHSE)):
        rows, steps = flat_rows(pages)
        row_RX = numbers(steps)
        for row_X, place, packs_H in zip(row_RX, request_R.tolist(), packs_RH, strict=True):
            if heads_RH is None:
                _copy(rows, row_X, packed[place])
            else:
                packed[place].detach()[packs_H] = rows[row_X.view(H, S)[packs_H]]


def pack_layers(
    layers: Sequence[Segment], block_table_BP: torch.Tensor, request: int, index_LHK: torch.Tensor, sink_1: torch.Tensor
) -> None:
    """Pack one request in L layers, in place; the indices of all layers are computed at once.

    Arguments and errors as in `pack`, but `layers`: of each layer, pages of keys and values, and packed keys,
    values, positions and lengths. All layers have equal KV heads, page sizes and packed rows.
    """
    key_PHND, _, key_BHSD, *_ = layers[0]
    H, S, N = key_PHND.shape[1], key_BHSD.shape[2], key_PHND.shape[2]
    check_shapes("index LHK", index_LHK, L=len(layers), H=H)
    check_int32(key_PHND.device, index=index_LHK, sink=sink_1)
    if index_LHK.shape[2] > S:
        raise ValueError(f"index must have at most S={S} positions, got {index_LHK.shape[2]}")
    position_LHS = packed_positions(index_LHK, sink_1, S)
    length_LH = (position_LHS >= 0).sum(2, dtype=torch.int32)
    table_LP = block_table_BP[request].expand(len(layers), -1)
    numbers = cache(partial(row_numbers, position_LHS, table_LP, N))
    for place, (key, value, packed_key, packed_value, position_BHS, length_BH) in enumerate(layers):
        position_BHS[request], length_BH[request] = position_LHS[place], length_LH[place]
        for pages, packed in ((key, packed_key), (value, packed_value)):
            rows, steps = flat_rows(pages)
            _copy(rows, numbers(steps)[place], packed[request])


def packed_positions(index_RHK: torch.Tensor, sink_R: torch.Tensor, S: int) -> torch.Tensor:
    """Return the positions of the packed rows, [R, H, S] int32: sinks, then selected, then -1."""
    R, H, K = index_RHK.shape
    slot_S = torch.arange(S, device=index_RHK.device)
    rank_RS = slot_S - sink_R[:, None]
    # column K is the padding
    column_RHS = rank_RS.clamp(0, K)[:, None].expand(R, H, S)
    selected_RHS = pad(index_RHK, (0, 1), value=-1).gather(2, column_RHS)
    return torch.where(rank_RS[:, None] < 0, slot_S.int(), selected_RHS)


def _copy(rows_XD: torch.Tensor, row_X: torch.Tensor, packed_HSD: torch.Tensor) -> None:
    # rows of one flat tensor, straight to their place: on a CPU a tenth of an index for each dimension
    target = packed_HSD.detach().view(-1, rows_XD.shape[1])
    torch.index_select(rows_XD, 0, row_X, out=target)


def recall(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor, request_R: torch.Tensor,
    index_RHK: torch.Tensor, sink_R: torch.Tensor, old_key_RHSD: torch.Tensor, old_value_RHSE: torch.Tensor,
    old_position_RHS: torch.Tensor, old_length_RH: torch.Tensor, key_BHSD: torch.Tensor, value_BHSE: torch.Tensor,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, fetched_RH: torch.Tensor, *,
    heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Do as `pack` from pages in host memory, reading only rows there that a copy of the old segments lacks.

    FreeKV (Sec. 4.2) and SyncKV (Eq. 7) copy pages from the host to the device; here the kernel reads the rows over the
    link itself, so that the host never waits for the indices.

    Paper gap: SyncKV does not say whether rows that stay selected are fetched again. FreeKV keeps a cache of
    selected pages on the device. We reuse single rows, from the packed segment alone.

    Arguments as in `pack`; the pages are pinned when the rest is on a CUDA device. The `old` tensors are copies of the
    requests' segments, R rows in place of B; their positions and those to recall ascend. `fetched_RH`, int32, gets how
    many rows came from the host.
    """
    old = old_key_RHSD, old_value_RHSE, old_position_RHS, old_length_RH
    segment = key_BHSD, value_BHSE, position_BHS, length_BH
    check_recall(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, old, segment, fetched_RH, heads_RH)
    fetched_RH.zero_()
    S, sinks = key_BHSD.shape[2], sink_R.tolist()
    for row, request in enumerate(request_R.tolist()):
        for head in range(index_RHK.shape[1] if request >= 0 else 0):
            if heads_RH is not None and not heads_RH[row, head]:
                continue
            known, target = (tuple(part[at, head] for part in parts) for at, parts in ((row, old), (request, segment)))
            index_K = index_RHK[row, head]
            sink_X = torch.arange(min(sinks[row], S), device=index_K.device, dtype=torch.int32)
            wanted_X = torch.cat([sink_X, index_K[index_K >= 0]])[:S]
            pages = key_PHND[:, head], value_PHNE[:, head]
            fetched_RH[row, head] = _recall_head(pages, block_table_BP[request], wanted_X, known, target)


def _recall_head(
    pages: tuple[torch.Tensor, torch.Tensor], block_table_P: torch.Tensor, wanted_X: torch.Tensor,
    old: tuple[torch.Tensor, ...], into: tuple[torch.Tensor, ...],
) -> int:  # fmt: skip
    *old_rows, position_S, length = old
    *into_rows, into_position_S, into_length = into
    known = position_S[: int(length)]
    place_X = torch.searchsorted(known, wanted_X)
    on_device_X = (place_X < len(known)) & torch.isin(wanted_X, known)
    token = wanted_X[~on_device_X].long()
    page, offset = block_table_P.long()[token // pages[0].shape[1]], token % pages[0].shape[1]
    slot = torch.arange(len(wanted_X), device=wanted_X.device)
    for host, rows, target in zip(pages, old_rows, into_rows, strict=True):
        target[slot[on_device_X]] = rows[place_X[on_device_X]]
        target[slot[~on_device_X]] = host[page, offset]
    into_position_S.fill_(-1)[: len(wanted_X)] = wanted_X
    into_length.fill_(len(wanted_X))
    return len(token)


def check(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor, request_R: torch.Tensor,
    index_RHK: torch.Tensor, sink_R: torch.Tensor, segment: tuple[torch.Tensor, ...], heads_RH: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise the errors of `pack`; a segment are keys, values, positions and lengths."""
    key_BHSD, value_BHSE, position_BHS, length_BH = segment
    check_shapes("key_pages PHND, value_pages PHNE", key_PHND, value_PHNE)
    (_, H, _, D), E = key_PHND.shape, value_PHNE.shape[3]
    names = "key BHSD, value BHSE, position BHS, length BH, block_table Bp"
    check_shapes(names, *segment, block_table_BP, H=H, D=D, E=E)
    check_shapes("request R, index RHK, sink R", request_R, index_RHK, sink_R, H=H)
    check_same(key_BHSD, "key", key=key_BHSD)
    check_same(value_BHSE, "value", value=value_BHSE)
    check_int32(
        key_BHSD.device, block_table=block_table_BP, request=request_R, index=index_RHK,
        sink=sink_R, position=position_BHS, length=length_BH,
    )  # fmt: skip
    if index_RHK.shape[2] > key_BHSD.shape[2]:
        raise ValueError(f"index must have at most S={key_BHSD.shape[2]} positions, got {index_RHK.shape[2]}")
    if heads_RH is not None:
        check_shapes("heads RH", heads_RH, R=len(request_R), H=H)
        check_int32(key_BHSD.device, heads=heads_RH)
    check_pages(key_BHSD, "key", key_pages=key_PHND)
    check_pages(value_BHSE, "value", value_pages=value_PHNE)


def check_recall(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor,
    old: tuple[torch.Tensor, ...], segment: tuple[torch.Tensor, ...], fetched_RH: torch.Tensor,
    heads_RH: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise the errors of `recall`; `old` and `segment` are segments as in `check`."""
    check(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, segment, heads_RH)
    key, value, position, length = old
    names = "key BHSD, value BHSE, request R, old_key RHSD, old_value RHSE, old_position RHS, old_length RH"
    check_shapes(names + ", fetched RH", *segment[:2], request_R, *old, fetched_RH)
    check_same(segment[0], "key", old_key=key)
    check_same(segment[1], "value", old_value=value)
    check_int32(segment[0].device, old_position=position, old_length=length, fetched=fetched_RH)
