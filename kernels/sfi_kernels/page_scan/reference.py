"""Choosing pages by bounds of their logits, in PyTorch, request by request."""

from typing import NamedTuple

import torch

from sfi_kernels import step_descriptor as step
from sfi_kernels.choice import Choice, write_row
from sfi_kernels.op import check_int32, check_pages, check_same, check_shapes
from sfi_kernels.pages import read_pages
from sfi_kernels.step_descriptor import StepDescriptor


class PageSummaries(NamedTuple):
    """Each channel's least and largest key by page, in the keys' dtype; undefined behind a request's last page."""

    low_BHPD: torch.Tensor
    high_BHPD: torch.Tensor


class LastStep(NamedTuple):
    """What a step leaves for the next: its queries, [B, 2, H, G, D], and what it chose ahead, [B, 2, H, K] int32.

    A step of `length` tokens writes the place `length % 2` and reads the other, so that it can be done twice.
    """

    query_B2HGD: torch.Tensor
    index_B2HK: torch.Tensor


def page_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor,
    pages: PageSummaries, position_BHS: torch.Tensor, length_BH: torch.Tensor, last: LastStep | None = None, *,
    page: int, budget: int, recent: int = 0, scale: float = 1.0, tau: float = 0.0, diagnoses: bool = False,
    grouped: bool = False, early: bool = False,
) -> Choice:  # fmt: skip
    """Choose `budget` positions of J for every fast request: whole pages, the last one cut, by the highest scores.

    A page's score is the largest of its bounds by the query heads of a KV head (`bounds`), or, if `grouped`, the mean
    over G of the softmax of the bounds times `scale`. The extremes of the pages
    with new keys, of every request that decodes, are computed anew, in place of `pages`, from the keys' pages, which
    hold the last `page` tokens before the new ones, too. For fast requests `position_BHS` is written, their sinks, the
    chosen positions, then -1, and `length_BH`, how many there are. Where J has no more positions, all are chosen. An
    `early` choice is made before the step's new keys are there: those of the step before, as many, are taken in.
    What is kept, and what is written, has the rows that the descriptor's SLOT names; of -1 there is nothing.

    With `last`, which is updated, the choice is `grouped`, and for the next step, whose window has `recent` tokens.
    Read is what the last step chose; but a KV head is corrected, and reads its choice for this step, if the cosine of
    its queries with the last step's, the mean over G, is below `tau`. Triton leaves `index_BHK` undefined in other
    heads, unless `diagnoses` asks for `query_cosine` and for all heads'.
    """
    check(query_BHGD, key_PHND, block_table_BP, descriptor, pages, position_BHS, length_BH, last, page, budget)
    B, H = query_BHGD.shape[:2]
    index_BHK = position_BHS.new_full((B, H, budget), -1)
    ahead_BHK, cosine_BH = index_BHK.clone(), torch.zeros(B, H, device=length_BH.device)
    for row, words in enumerate(descriptor.table_BX.tolist()):
        first, stop, length = (words[word] for word in (step.ALLOWED_START, step.ALLOWED_STOP, step.LENGTH))
        if words[step.MODE] < step.FAST or (slot := words[step.SLOT]) < 0:
            continue
        length -= words[step.QUERIES] * early
        _renew(key_PHND, block_table_BP[row], pages, slot, length - words[step.QUERIES], length, page)
        if words[step.MODE] != step.FAST:
            continue
        bound_HGP = bounds(query_BHGD[row], *(part_BHPD[slot, :, : -(-length // page)] for part_BHPD in pages))
        score_HP = group_scores(bound_HGP, scale) if grouped or last is not None else bound_HGP.amax(1)
        index_HK = read_HK = best_pages(score_HP, page, (first, stop), budget)
        index_BHK[row, :, : index_HK.shape[1]] = index_HK
        if last is not None:
            now, before_HK = length % 2, last.index_B2HK[slot, 1 - length % 2, :, : index_HK.shape[1]]
            cosine_BH[row] = pooled_cosine(query_BHGD[row], last.query_B2HGD[slot, 1 - now])
            read_HK = torch.where(cosine_BH[row, :, None] < tau, index_HK, before_HK)
            next_HK = best_pages(score_HP, page, (first, max(first, length + 1 - recent)), budget)
            ahead_BHK[row, :, : next_HK.shape[1]] = next_HK
            last.query_B2HGD[slot, now], last.index_B2HK[slot, now] = query_BHGD[row], ahead_BHK[row]
        write_row(position_BHS, length_BH, slot, first, read_HK)
    if last is None:
        return Choice(index_BHK)
    return Choice(index_BHK, None, {"query_cosine": cosine_BH} if diagnoses else {}, cosine_BH < tau, ahead_BHK)


def summarize(key_HTD: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each channel's least and largest key by page, [H, P, D]; the last page may lack tokens."""
    H, T, D = key_HTD.shape
    full = T - T % page
    parts = [key_HTD[:, :full].view(H, -1, page, D), key_HTD[:, None, full:]]
    parts = [part for part in parts if part.shape[1] * part.shape[2]]
    low, high = (torch.cat([getattr(part, end)(2) for part in parts], 1) for end in ("amin", "amax"))
    return low, high


def bounds(query_HGD: torch.Tensor, low_HPD: torch.Tensor, high_HPD: torch.Tensor) -> torch.Tensor:
    """Return upper bounds of the products of queries with the keys of each page, [H, G, P] float32."""
    query = query_HGD.float()
    return query.clamp_min(0) @ high_HPD.float().mT + query.clamp_max(0) @ low_HPD.float().mT


def group_scores(bound_HGP: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the group-consistent page scores, the mean over G of softmax(P^h), [H, P] (FreeKV, Sec. 3.2).

    Paper gap: the softmax includes the pages of sink and recent tokens, which are not selected.
    """
    return (bound_HGP * scale).softmax(-1).mean(1)


def pooled_cosine(query_HGD: torch.Tensor, last_HGD: torch.Tensor) -> torch.Tensor:
    """Return C_i, the cosine of this step's query with the last one's, the mean over G, [H] (FreeKV, Sec. 3.3)."""
    return torch.cosine_similarity(query_HGD.float(), last_HGD.float(), -1).mean(-1)


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


def _renew(
    key: torch.Tensor, table_P: torch.Tensor, pages: PageSummaries, row: int, begin: int, length: int, page: int
) -> None:
    # the extremes of a request's pages with positions from `begin` on
    first = begin // page
    new_HTD = read_pages(key, table_P, first * page, length)[0]
    for part_BHPD, new_HPD in zip(pages, summarize(new_HTD, page), strict=True):
        part_BHPD[row, :, first : first + new_HPD.shape[1]] = new_HPD


def check(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, descriptor: StepDescriptor, pages: PageSummaries,
    position: torch.Tensor, length: torch.Tensor, last: LastStep | None, page: int, budget: int,
) -> None:  # fmt: skip
    """Raise the errors of `page_scan`."""
    names = "key PHND, query BHGD, block_table Bt, low RHXD, high RHXD, position RHS, length RH"
    check_shapes(names, key, query, table, *pages, position, length, B=descriptor.batch)
    check_pages(query, "query", key=key)
    check_same(query, "query", low=pages.low_BHPD, high=pages.high_BHPD)
    check_int32(query.device, block_table=table, position=position, length=length)
    if page < 1:
        raise ValueError(f"page must be positive, got {page}")
    if last is not None:
        check_shapes("query BHGD, last query RZHGD, last index RZHK", query, *last, Z=2, K=budget)
        check_same(query, "query", last_query=last.query_B2HGD)
        check_int32(query.device, last_index=last.index_B2HK)
