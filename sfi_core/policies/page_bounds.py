"""Page summaries: the element-wise extremes of a page's keys bound a query's logits (Quest, FreeKV)."""

import torch

from sfi_core.policies.context import LayerContext, Notes


def extremes(context: LayerContext, place: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and highest of each channel by page of a request's keys, each [H, P, D] float32.

    A full page is looked at once and kept in the notes; the last page may be a part of one.
    """
    note, length = context.notes[place], context.states[place].length
    known = note["low"].shape[1] * page if "low" in note else 0
    full = length - length % page
    if full > known:
        key_HTD = context.keys(place, known, full)[0].float()
        key_HPND = key_HTD.reshape(len(key_HTD), -1, page, key_HTD.shape[2])
        _extend(note, key_HPND.amin(2), key_HPND.amax(2))
    if full == length:
        return note["low"], note["high"]
    rest_HND = context.keys(place, full, length)[0].float()
    low_H1D, high_H1D = rest_HND.amin(1, keepdim=True), rest_HND.amax(1, keepdim=True)
    if not full:
        return low_H1D, high_H1D
    return torch.cat([note["low"], low_H1D], 1), torch.cat([note["high"], high_H1D], 1)


def bounds(query_HGD: torch.Tensor, low_HPD: torch.Tensor, high_HPD: torch.Tensor) -> torch.Tensor:
    """Return the upper bound of each query's product with the keys of each page, [H, G, P] float32."""
    query = query_HGD.float()
    return query.clamp_min(0) @ high_HPD.mT + query.clamp_max(0) @ low_HPD.mT


def _extend(note: Notes, low_HPD: torch.Tensor, high_HPD: torch.Tensor) -> None:
    for name, new_HPD in (("low", low_HPD), ("high", high_HPD)):
        note[name] = torch.cat([note[name], new_HPD], 1) if name in note else new_HPD
