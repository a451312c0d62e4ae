"""Packing in PyTorch (Reorg, Sec. 4)."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch.nn.functional import pad

from sfi_kernels.pages import flat_rows, row_numbers
from sfi_kernels.shapes import check_int32, check_pages, check_same, check_shape

# of a layer: key_PHND, value_PHNE, key_BHSD, value_BHSE, position_BHS, length_BH
Segment = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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

    Args:
        key_PHND: Pages of keys.
        value_PHNE: Pages of values.
        block_table_BP: Page numbers of each request, int32.
        request_R: The requests to pack, int32, each once; -1 for a row without a request.
        index_RHK: Positions to pack behind the sinks, int32, padded with -1 at the end.
        sink_R: Sink tokens, positions 0 to `sink - 1`, int32. At most S - K; further sinks are cut off.
        key_BHSD: Packed keys; rows beyond a request's length are undefined.
        value_BHSE: Packed values, likewise.
        position_BHS: The packed rows' positions, int32, padded with -1.
        length_BH: Rows that count, int32.
        heads_RH: 0 for a KV head that keeps its rows, positions and length, int32; None packs every head.

    Raises:
        ValueError: The shapes, dtypes or devices do not fit, or a tensor but the pages is not contiguous.
    """
    check(
        key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R,
        key_BHSD, value_BHSE, position_BHS, length_BH,
    )  # fmt: skip
    refreshed_RH = index_RHK.new_ones(index_RHK.shape[:2])
    if heads_RH is not None:
        check_heads(heads_RH, index_RHK)
        refreshed_RH = heads_RH
    real_R = request_R >= 0
    if not real_R.all():
        request_R, index_RHK, sink_R = request_R[real_R], index_RHK[real_R], sink_R[real_R]
        refreshed_RH = refreshed_RH[real_R]
    (_, H, _), S = index_RHK.shape, key_BHSD.shape[2]
    request = request_R.long()
    position_RHS = packed_positions(index_RHK, sink_R, S)
    length_RH = (position_RHS >= 0).sum(2, dtype=torch.int32)
    is_own_RH = refreshed_RH != 0
    position_BHS[request] = torch.where(is_own_RH[..., None], position_RHS, position_BHS[request])
    length_BH[request] = torch.where(is_own_RH, length_RH, length_BH[request])

    # computed once for all pages of the same steps
    table_RP = block_table_BP[request]
    numbers = cache(partial(row_numbers, position_RHS, table_RP, key_PHND.shape[2]))
    for pages, packed in ((key_PHND, key_BHSD), (value_PHNE, value_BHSE)):
        rows, steps = flat_rows(pages)
        row_RX = numbers(steps)
        for row_X, place, is_own_H in zip(row_RX, request_R.tolist(), is_own_RH, strict=True):
            if heads_RH is None:
                _copy(rows, row_X, packed[place])
            else:
                packed[place].detach()[is_own_H] = rows[row_X.view(H, S)[is_own_H]]


def pack_layers(
    layers: Sequence[Segment], block_table_BP: torch.Tensor, request: int, index_LHK: torch.Tensor, sink_1: torch.Tensor
) -> None:
    """Pack one request in L layers, in place; the indices of all layers are computed at once.

    Arguments and errors as in `pack`, but `layers`: of each layer, pages of keys and values, and packed keys,
    values, positions and lengths. All layers have equal KV heads, page sizes and packed rows.
    """
    key_PHND, _, key_BHSD, *_ = layers[0]
    H, S, N = key_PHND.shape[1], key_BHSD.shape[2], key_PHND.shape[2]
    check_shape(index_LHK, "index", L=len(layers), H=H, K=None)
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


def check_heads(heads_RH: torch.Tensor, index_RHK: torch.Tensor) -> None:
    """Raise the errors of `heads_RH`."""
    check_shape(heads_RH, "heads", R=index_RHK.shape[0], H=index_RHK.shape[1])
    check_int32(index_RHK.device, heads=heads_RH)


def check(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor, key_BHSD: torch.Tensor,
    value_BHSE: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor,
) -> None:  # fmt: skip
    """Raise the errors of `pack`."""
    check_shape(key_PHND, "key_pages", P=None, H=None, N=None, D=None)
    check_shape(key_BHSD, "key", B=None, H=key_PHND.shape[1], S=None, D=key_PHND.shape[3])
    P, H, N, _ = key_PHND.shape
    B, _, S, _ = key_BHSD.shape
    check_shape(value_PHNE, "value_pages", P=P, H=H, N=N, E=None)
    check_shape(value_BHSE, "value", B=B, H=H, S=S, E=value_PHNE.shape[3])
    check_shape(block_table_BP, "block_table", B=B, P=None)
    check_shape(request_R, "request", R=None)
    check_shape(index_RHK, "index", R=len(request_R), H=H, K=None)
    check_shape(sink_R, "sink", R=len(request_R))
    check_shape(position_BHS, "position", B=B, H=H, S=S)
    check_shape(length_BH, "length", B=B, H=H)
    check_same(key_BHSD, "key", key=key_BHSD)
    check_same(value_BHSE, "value", value=value_BHSE)
    check_pages(key_BHSD, "key", key_pages=key_PHND)
    check_pages(value_BHSE, "value", value_pages=value_PHNE)
    check_int32(
        key_PHND.device, block_table=block_table_BP, request=request_R, index=index_RHK,
        sink=sink_R, position=position_BHS, length=length_BH,
    )  # fmt: skip
    if index_RHK.shape[2] > S:
        raise ValueError(f"index must have at most S={S} positions, got {index_RHK.shape[2]}")
