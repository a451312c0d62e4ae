"""Page summaries: the element-wise extremes of a page's keys bound the logits of a query (Quest, FreeKV)."""

import torch

from sfi_core.policies.base import LayerContext, Notes
from sfi_core.state.layer_pages import LayerShape


def extremes(context: LayerContext, place: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each channel's least and largest key by page of a request, [H, P, D] float32; notes have full pages'."""
    note, length = context.notes[place], context.states[place].length
    summarized = note["low"].shape[1] * page if "low" in note else 0
    full = length - length % page
    if full > summarized:
        key_HTD = context.keys(place, summarized, full)[0].float()
        key_HPND = key_HTD.reshape(len(key_HTD), -1, page, key_HTD.shape[2])
        for name, new_HPD in (("low", key_HPND.amin(2)), ("high", key_HPND.amax(2))):
            note[name] = torch.cat([note[name], new_HPD], 1) if name in note else new_HPD
    if full == length:
        return note["low"], note["high"]
    rest_HND = context.keys(place, full, length)[0].float()
    low_H1D, high_H1D = rest_HND.amin(1, keepdim=True), rest_HND.amax(1, keepdim=True)
    if not full:
        return low_H1D, high_H1D
    return torch.cat([note["low"], low_H1D], 1), torch.cat([note["high"], high_H1D], 1)


def forget(note: Notes, length: int, page: int) -> None:
    """Drop the extremes of pages with positions >= `length`."""
    for name in ("low", "high"):
        if name in note:
            note[name] = note[name][:, : length // page]


def extremes_bytes(layer: LayerShape, capacity: int, page: int) -> int:
    """Return the bytes of the extremes and scores of the pages of `capacity` tokens, float32."""
    numbers = 2 * layer.key_width + 1
    return -(-capacity // page) * layer.heads * numbers * torch.float32.itemsize


def bounds(query_HGD: torch.Tensor, low_HPD: torch.Tensor, high_HPD: torch.Tensor) -> torch.Tensor:
    """Return upper bounds of the products of queries with the keys of each page, [H, G, P] float32."""
    query = query_HGD.float()
    return query.clamp_min(0) @ high_HPD.mT + query.clamp_max(0) @ low_HPD.mT


def best_pages(score_HP: torch.Tensor, page: int, allowed: tuple[int, int], budget: int) -> torch.Tensor:
    """Return the positions of the pages with the highest scores, ascending, [H, min(budget, |J|)] int32.

    Equals Top-K over positions with the scores of their pages, but sorts only the pages. Without a sync. `page` are
    the tokens of a page; `allowed` is J: its first position, and one past its last. The last page may be cut short.
    """
    H, P = score_HP.shape
    first, stop = allowed
    K = max(0, min(budget, stop - first))
    begin_P = torch.arange(P, device=score_HP.device) * page
    start_P = begin_P.clamp(first, stop)
    size_HP = ((begin_P + page).clamp(first, stop) - start_P).expand(H, P)
    order_HP = score_HP.argsort(dim=1, descending=True, stable=True)
    ahead_HP = size_HP.gather(1, order_HP).cumsum(1)
    before_HP = torch.empty_like(ahead_HP).scatter_(1, order_HP, ahead_HP) - size_HP
    taken_X = torch.minimum((K - before_HP).clamp_min(0), size_HP).flatten()
    # repeat each page's start as often as it has taken positions, and count up from it
    end_X = taken_X.cumsum(0)
    shift_X = start_P.repeat(H) - (end_X - taken_X)
    position_X = torch.repeat_interleave(shift_X, taken_X, output_size=H * K)
    position_X += torch.arange(H * K, device=score_HP.device)
    return position_X.view(H, K).int()
