"""Appending to the cache, packing (Reorg, Sec. 4) and recall (FreeKV, Sec. 4.2; SyncKV, Eq. 7) in PyTorch."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch.nn.functional import pad

from sfi_kernels.op import check_int32, check_pages, check_same, check_shapes
from sfi_kernels.pages import flat_rows, row_numbers

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
) -> None:
    """Write each request's new tokens in place: keys, values and the keys' float32 norms.

    A request's new keys and values are the last `count` of T, in the pages' dtype, with a last stride of 1; 0 leaves it
    unchanged. `start_B` is the position of its first one. The block table has room for all.
    """
    check_append(key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP)
    T, N = key_BHTD.shape[2], key_PHND.shape[2]
    norm_BHT = torch.linalg.vector_norm(key_BHTD, dim=-1, dtype=torch.float32)
    tables = block_table_BP.tolist()
    for row, (start, count) in enumerate(zip(start_B.tolist(), count_B.tolist(), strict=True)):
        token = first = T - count
        while token < T:  # page by page
            slot, offset = divmod(start + token - first, N)
            size = min(T - token, N - offset)
            page, to, part = tables[row][slot], slice(offset, offset + size), slice(token, token + size)
            key_PHND[page, :, to] = key_BHTD[row, :, part]
            value_PHNE[page, :, to] = value_BHTE[row, :, part]
            norm_PHN[page, :, to] = norm_BHT[row, :, part]
            token += size


def check_append(*operands: torch.Tensor) -> None:
    """Raise the errors of `append`, given its arguments."""
    key_BHTD, value_BHTE, start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP = operands
    names = "key BHTD, value BHTE, start B, count B, key_pages PHND, value_pages PHNE, norm PHN, block_table Bp"
    check_shapes(names, *operands)
    check_pages(key_BHTD, "key", key_pages=key_PHND)
    check_pages(value_BHTE, "value", value_pages=value_PHNE)
    check_int32(key_BHTD.device, start=start_B, count=count_B, block_table=block_table_BP)
    if norm_PHN.dtype != torch.float32 or not norm_PHN.is_contiguous():
        raise ValueError(f"norm must be contiguous float32, got {norm_PHN.dtype} with strides {norm_PHN.stride()}")
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
    index_RHK: torch.Tensor, sink_R: torch.Tensor, key_BHSD: torch.Tensor, value_BHSE: torch.Tensor,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, into_key_RHSD: torch.Tensor,
    into_value_RHSE: torch.Tensor, into_position_RHS: torch.Tensor, into_length_RH: torch.Tensor,
    fetched_RH: torch.Tensor, *, heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write what `pack` would into a scratch segment, reading host pages only for rows that are new.

    A row comes from the old segment if its position is there, else from the host pages. The caller copies the
    scratch to the segment afterwards. FreeKV (Sec. 4.2) and SyncKV (Eq. 7) copy pages from the host to the device; here
    the kernel reads the rows over the link itself, so that the host never waits for the indices.

    Paper gap: SyncKV does not say whether rows that stay selected are fetched again. FreeKV keeps a cache of
    selected pages on the device. We reuse single rows, from the packed segment alone.

    Arguments as in `pack`, but the pages are on the host, pinned when the rest is on a CUDA device, and
    `block_table_BP` numbers them; keys and values may be views of pages [P, H, 2, N, D]. The positions to recall and
    those of the old segment ascend. The `into` tensors have R rows in place of B, and `fetched_RH`, int32, gets how
    many rows came from the host. A head whose `heads_RH` is 0 gets a copy of its old rows, positions and length.
    """
    old = key_BHSD, value_BHSE, position_BHS, length_BH
    into = into_key_RHSD, into_value_RHSE, into_position_RHS, into_length_RH
    check_recall(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, old, into, fetched_RH, heads_RH)
    fetched_RH.zero_()
    S, sinks = key_BHSD.shape[2], sink_R.tolist()
    for row, request in enumerate(request_R.tolist()):
        for head in range(index_RHK.shape[1] if request >= 0 else 0):
            known = tuple(part[request, head] for part in old)
            target = tuple(part[row, head] for part in into)
            if heads_RH is not None and not heads_RH[row, head]:
                for part, copy in zip(known, target, strict=True):
                    copy.copy_(part)
                continue
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
    N = pages[0].shape[1]
    page, offset = (x.to(pages[0].device) for x in (block_table_P.long()[token // N], token % N))
    slot = torch.arange(len(wanted_X), device=wanted_X.device)
    for host, rows, target in zip(pages, old_rows, into_rows, strict=True):
        target[slot[on_device_X]] = rows[place_X[on_device_X]]
        target[slot[~on_device_X]] = host[page, offset].to(target.device)
    into_position_S.fill_(-1)[: len(wanted_X)] = wanted_X
    into_length.fill_(len(wanted_X))
    return len(token)


def check(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor, request_R: torch.Tensor,
    index_RHK: torch.Tensor, sink_R: torch.Tensor, segment: tuple[torch.Tensor, ...], heads_RH: torch.Tensor | None,
    *, host: bool = False,
) -> None:  # fmt: skip
    """Raise the errors of `pack`; a segment are keys, values, positions and lengths. Pages may be on the `host`."""
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
    for name, pages, packed in (("key", key_PHND, key_BHSD), ("value", value_PHNE, value_BHSE)):
        if pages.dtype != packed.dtype:
            raise ValueError(f"{name}_pages must have the dtype of {name}, {packed.dtype}, got {pages.dtype}")
        if pages.device != packed.device and not (host and pages.device.type == "cpu"):
            raise ValueError(f"{name}_pages must be on {packed.device} like {name}, got {pages.device}")


def check_recall(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor,
    old: tuple[torch.Tensor, ...], into: tuple[torch.Tensor, ...], fetched_RH: torch.Tensor,
    heads_RH: torch.Tensor | None,
) -> None:  # fmt: skip
    """Raise the errors of `recall`; `old` and `into` are segments as in `check`."""
    check(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, old, heads_RH, host=True)
    key, value, position, length = into
    names = "key BHSD, value BHSE, request R, into_key RHSD, into_value RHSE, into_position RHS, into_length RH"
    check_shapes(names + ", fetched RH", *old[:2], request_R, *into, fetched_RH)
    check_same(old[0], "key", into_key=key)
    check_same(old[1], "value", into_value=value)
    check_int32(old[0].device, into_position=position, into_length=length, fetched=fetched_RH)
