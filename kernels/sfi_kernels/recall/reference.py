"""Recall in PyTorch (FreeKV, Sec. 4.2; SyncKV, Eq. 7)."""

import torch

from sfi_kernels.pack.reference import check_heads
from sfi_kernels.shapes import check_int32, check_same, check_shape


def recall(
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor, request_R: torch.Tensor,
    index_RHK: torch.Tensor, sink_R: torch.Tensor, key_BHSD: torch.Tensor, value_BHSE: torch.Tensor,
    position_BHS: torch.Tensor, length_BH: torch.Tensor, into_key_RHSD: torch.Tensor,
    into_value_RHSE: torch.Tensor, into_position_RHS: torch.Tensor, into_length_RH: torch.Tensor,
    fetched_RH: torch.Tensor, *, heads_RH: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write what `pack` would into a scratch segment, reading host pages only for rows that are new.

    A row comes from the old segment if its position is there, else from the host pages. The caller copies the
    scratch to the segment afterwards.

    FreeKV (Sec. 4.2) and SyncKV (Eq. 7) copy pages from the host to the device. Here the kernel on the device
    reads the rows over the link itself (zero copy), so that the host never waits for the indices. FreeKV
    converts the layout on recall, since its device pages are token-major; ours are head-major.

    Paper gap: SyncKV does not say whether rows that stay selected are fetched again. FreeKV keeps a cache of
    selected pages on the device. We reuse single rows, from the packed segment alone.

    Arguments as in `pack`, with these differences. The pages are on the host, pinned when the rest is on a CUDA device,
    and `block_table_BP` numbers them; FreeKV's pages, [P, H, 2, N, D] with keys and values side by side, are passed as
    two views. The positions to recall and those of the old segment ascend. The results go to the `into` tensors, which
    have R rows in place of B, and `fetched_RH`, int32, gets how many rows came from the host, 0 for a row without a
    request. A head whose `heads_RH` is 0 gets a copy of its old rows, positions and length.

    Raises:
        ValueError: A tensor's shape, dtype, device or layout does not fit.
    """
    old = key_BHSD, value_BHSE, position_BHS, length_BH
    into = into_key_RHSD, into_value_RHSE, into_position_RHS, into_length_RH
    check(key_PHND, value_PHNE, block_table_BP, request_R, index_RHK, sink_R, old, into, fetched_RH)
    if heads_RH is not None:
        check_heads(heads_RH, index_RHK)
    fetched_RH.zero_()
    S, sinks = key_BHSD.shape[2], sink_R.tolist()
    for row, request in enumerate(request_R.tolist()):
        for head in range(index_RHK.shape[1] if request >= 0 else 0):
            own = tuple(part[request, head] for part in old)
            target = tuple(part[row, head] for part in into)
            if heads_RH is not None and not heads_RH[row, head]:
                for part, copy in zip(own, target, strict=True):
                    copy.copy_(part)
                continue
            index_K = index_RHK[row, head]
            sink_X = torch.arange(min(sinks[row], S), device=index_K.device, dtype=torch.int32)
            wanted_X = torch.cat([sink_X, index_K[index_K >= 0]])[:S]
            pages = key_PHND[:, head], value_PHNE[:, head]
            fetched = _recall_head(pages, block_table_BP[request], wanted_X, own, target)
            fetched_RH[row, head] = fetched


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
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor,
    old: tuple[torch.Tensor, ...], into: tuple[torch.Tensor, ...], fetched_RH: torch.Tensor,
) -> None:  # fmt: skip
    """Raise the errors of `recall`; `old` and `into` are keys, values, positions and lengths."""
    check_shape(key_PHND, "key_pages", P=None, H=None, N=None, D=None)
    P, H, N, D = key_PHND.shape
    check_shape(value_PHNE, "value_pages", P=P, H=H, N=N, E=None)
    check_shape(old[0], "key", B=None, H=H, S=None, D=D)
    B, _, S, _ = old[0].shape
    check_shape(block_table_BP, "block_table", B=B, P=None)
    check_shape(request_R, "request", R=None)
    R, E = len(request_R), value_PHNE.shape[3]
    check_shape(index_RHK, "index", R=R, H=H, K=None)
    check_shape(sink_R, "sink", R=R)
    check_shape(fetched_RH, "fetched", R=R, H=H)
    for (key, value, position, length), before, sizes in ((old, "", {"B": B}), (into, "into_", {"R": R})):
        check_shape(key, f"{before}key", **sizes, H=H, S=S, D=D)
        check_shape(value, f"{before}value", **sizes, H=H, S=S, E=E)
        check_shape(position, f"{before}position", **sizes, H=H, S=S)
        check_shape(length, f"{before}length", **sizes, H=H)
    check_same(old[0], "key", key=old[0], into_key=into[0])
    check_same(old[1], "value", value=old[1], into_value=into[1])
    check_int32(
        old[0].device, block_table=block_table_BP, request=request_R, index=index_RHK, sink=sink_R,
        position=old[2], length=old[3], into_position=into[2], into_length=into[3],
        fetched=fetched_RH,
    )  # fmt: skip
    _check_pages(key_PHND, "key", old[0])
    _check_pages(value_PHNE, "value", old[1])
    if index_RHK.shape[2] > S:
        raise ValueError(f"index must have at most S={S} positions, got {index_RHK.shape[2]}")


def _check_pages(pages: torch.Tensor, name: str, packed: torch.Tensor) -> None:
    if pages.dtype != packed.dtype:
        raise ValueError(f"{name}_pages must have the dtype of {name}, {packed.dtype}, got {pages.dtype}")
    if pages.device.type != "cpu" and pages.device != packed.device:
        raise ValueError(f"{name}_pages must be on the host or on {packed.device}, got {pages.device}")
