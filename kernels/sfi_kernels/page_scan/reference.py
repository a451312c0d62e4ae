"""Choosing pages by bounds of their logits, in PyTorch, request by request."""

from collections.abc import Iterator
from typing import Any

import torch

from sfi_kernels import step_descriptor as step
from sfi_kernels.choice import Choice, write_row
from sfi_kernels.op import check_int32, check_pages, check_same, check_shapes
from sfi_kernels.page_scan.summaries import LastStep, PageSummaries, summarize
from sfi_kernels.pages import read_pages
from sfi_kernels.step_descriptor import StepDescriptor


def page_scan(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor,
    pages: PageSummaries, position_BHS: torch.Tensor, length_BH: torch.Tensor, *, page: int, budget: int,
) -> Choice:  # fmt: skip
    """Choose `budget` positions of J for every fast request: whole pages, the last one cut, by the highest bound.

    A page's score is the largest of its bounds by the query heads of a KV head (`bounds`). The extremes of the pages
    with new keys, of every request that decodes, are computed anew, in place of `pages`, from the keys' pages, which
    hold the last `page` tokens before the new ones, too. For fast requests `position_BHS` is written, their sinks, the
    chosen positions, then -1, and `length_BH`, how many there are. Where J has no more positions, all are chosen.
    """
    check(query_BHGD, key_PHND, block_table_BP, descriptor, pages, position_BHS, length_BH, page)
    index_BHK = position_BHS.new_full((*length_BH.shape, budget), -1)
    for row, words, bound_HGP in _scanned(query_BHGD, key_PHND, block_table_BP, descriptor, pages, page):
        allowed = words[step.ALLOWED_START], words[step.ALLOWED_STOP]
        index_HK = best_pages(bound_HGP.amax(1), page, allowed, budget)
        index_BHK[row, :, : index_HK.shape[1]] = index_HK
        write_row(position_BHS, length_BH, row, allowed[0], index_HK)
    return Choice(index_BHK)


def page_scan_ahead(
    query_BHGD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor, descriptor: StepDescriptor,
    pages: PageSummaries, last: LastStep, position_BHS: torch.Tensor, length_BH: torch.Tensor, *, page: int,
    budget: int, recent: int, scale: float, tau: float, diagnoses: bool = False,
) -> Choice:  # fmt: skip
    """Choose as `page_scan` for the next step, whose window has `recent` tokens, and read what the last step chose.

    A KV head is corrected, and reads its choice for this step, if the cosine of its queries with the last step's, the
    mean over G, is below `tau`. A page's score is the mean over G of the softmax of the bounds times `scale`. Triton
    leaves `index_BHK` undefined in other heads, unless `diagnoses` asks for `query_cosine` and for all heads'.
    """
    check(query_BHGD, key_PHND, block_table_BP, descriptor, pages, position_BHS, length_BH, page)
    check_last(query_BHGD, last, budget)
    index_BHK = position_BHS.new_full((*length_BH.shape, budget), -1)
    ahead_BHK, cosine_BH = index_BHK.clone(), torch.zeros(length_BH.shape, device=length_BH.device)
    for row, words, bound_HGP in _scanned(query_BHGD, key_PHND, block_table_BP, descriptor, pages, page):
        first, stop, length = (words[word] for word in (step.ALLOWED_START, step.ALLOWED_STOP, step.LENGTH))
        score_HP, now = group_scores(bound_HGP, scale), length % 2
        cosine_BH[row] = pooled_cosine(query_BHGD[row], last.query_B2HGD[row, 1 - now])
        index_HK = best_pages(score_HP, page, (first, stop), budget)
        K = index_HK.shape[1]
        index_BHK[row, :, :K] = index_HK
        chosen_HK = torch.where(cosine_BH[row, :, None] < tau, index_HK, last.index_B2HK[row, 1 - now, :, :K])
        write_row(position_BHS, length_BH, row, first, chosen_HK)
        ahead_HK = best_pages(score_HP, page, (first, max(first, length + 1 - recent)), budget)
        ahead_BHK[row, :, : ahead_HK.shape[1]] = ahead_HK
        last.query_B2HGD[row, now], last.index_B2HK[row, now] = query_BHGD[row], ahead_BHK[row]
    diagnostics = {"query_cosine": cosine_BH} if diagnoses else {}
    return Choice(index_BHK, None, diagnostics, cosine_BH < tau, ahead_BHK)


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


def _scanned(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, descriptor: StepDescriptor, pages: PageSummaries,
    page: int,
) -> Iterator[tuple[int, list[int], torch.Tensor]]:  # fmt: skip
    # renews extremes; yields each fast request's row, words and bounds
    for row, words in enumerate(descriptor.table_BX.tolist()):
        mode, length = words[step.MODE], words[step.LENGTH]
        if mode < step.FAST:
            continue
        first, P = (length - words[step.QUERIES]) // page, -(-length // page)
        new_HTD = read_pages(key, table[row], first * page, length)[0]
        for part_BHPD, new_HPD in zip(pages, summarize(new_HTD, page), strict=True):
            part_BHPD[row, :, first:P] = new_HPD
        if mode == step.FAST:
            low_HPD, high_HPD = (part_BHPD[row, :, :P] for part_BHPD in pages)
            yield row, words, bounds(query[row], low_HPD, high_HPD)


def check(
    query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, descriptor: StepDescriptor, pages: PageSummaries,
    position: torch.Tensor, length: torch.Tensor, page: int,
) -> None:  # fmt: skip
    """Raise the errors of `page_scan`."""
    names = "key PHND, query BHGD, block_table Bt, low BHXD, high BHXD, position BHS, length BH"
    sizes: Any = {"B": descriptor.batch}
    check_shapes(names, key, query, table, *pages, position, length, **sizes)
    check_pages(query, "query", key=key)
    check_same(query, "query", low=pages.low_BHPD, high=pages.high_BHPD)
    check_int32(query.device, block_table=table, position=position, length=length)
    if page < 1:
        raise ValueError(f"page must be positive, got {page}")


def check_last(query: torch.Tensor, last: LastStep, budget: int) -> None:
    """Raise `ValueError` unless what the last step left fits the queries and the budget."""
    names = "query BHGD, last query BSHGD, last index BSHK"
    check_shapes(names, query, *last, S=2, K=budget)
    check_same(query, "query", last_query=last.query_B2HGD)
    check_int32(query.device, last_index=last.index_B2HK)
