"""CodeScan, a method of ours: every step scores all keys by short codes and reads the best keys exactly.

At the end of the prompt each KV head learns the directions in which the prompt's last queries tell its keys apart
(`learn_basis`). Each key is coded in that basis, in words (`sfi_kernels.code_scan`). After every `RELEARN` tokens the
basis is learned again, from the queries since then, because rotary positions turn them out of it: after 1,500 tokens
without that, SmolLM2-135M missed half of the attention. A step estimates the logits of all keys from the codes and
reads the keys with the highest probability, the mean over the queries of the KV head. A pseudo token with the mean
value stands for the unread keys, with `codescan.rest` of their estimated weight.

Its parts are known. Basis: KQ-SVD (arXiv 2512.05916) has this optimum, ours is centred; LRQK factors prompt queries
and keys at rank 32; Loki (Singhania et al., 2024) takes keys alone. Graded bits: SVDq (2502.15304), to compress. Scans
of few bits: FIER (2508.08256), Adamas (2510.18413), Self-Indexing KVCache (2603.14224), PQCache (Zhang et al., 2024),
HATA (Gong et al., 2025, trained). ParisKV (ICML 2026) argues that what is learned from a prompt drifts. SparQ (Ribar
et al., 2024) has the pseudo token, with all of the weight. Ours is the union, without training.
"""

import math
from functools import cache
from typing import ClassVar

import torch

from sfi_core.policies.base import BatchContext, Companion, LayerContext, Notes, Policy
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_kernels.choice import Choice
from sfi_kernels.code_scan import KEPT, SLOTS, BatchCodes, CodeBasis, code_scan, code_tokens, encode_keys
from sfi_kernels.code_scan.codes import bits_of, words
from sfi_kernels.compiled import fastest
from sfi_kernels.partial_attention import PseudoToken

QUERIES = 256  # the last queries of the prompt, which the basis is learned from
RELEARN = KEPT  # tokens of a request until it is learned again


class CodeScan(Companion, Policy):
    """Every step selects anew by the codes of all keys."""

    fills = drafts = offloads = coded = True
    prompt_only = True  # a lossless run keeps the prompt's basis too
    fixed: ClassVar = {"recent_mode": "sliding", "window_prefill": QUERIES}  # every step selects

    def select_after(self, context: LayerContext) -> None:
        """Learn the basis at the end of the prompt; select nothing yet."""
        for place, note in enumerate(context.notes):
            self._learn(context, place, note)

    @property
    def predicts(self) -> bool:
        """See `Policy`."""
        return self.config.codescan.ahead == "half"

    def keeps(
        self, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> BatchCodes:
        """See `Companion`."""
        return BatchCodes.empty(rows, group, key_PHND, value_PHNE, capacity)

    def choose(self, batch: BatchContext) -> Choice | None:
        """Choose by the current queries; code the new keys in any case."""
        device, pages, codes = batch.query_BHGD.device, (batch.key_PHND, batch.value_PHNE), batch.kept
        rows, backend = (batch.block_table_BP, batch.descriptor), fastest(batch.backend, device, *pages)
        if not batch.fast:
            code_tokens.on(backend)(batch.key_PHND, *rows, codes)
            return None
        self.key_width = batch.query_BHGD.shape[3]
        return code_scan.on(backend)(
            batch.query_BHGD, *pages, *rows, codes, batch.position_BHS, batch.length_BH,
            budget=batch.budget(self.config.budget),
            scale=batch.scale, rest=self.config.codescan.rest, diagnoses=batch.wants_diagnostics, early=batch.early,
        )  # fmt: skip

    def follow(self, batch: BatchContext, pseudo: PseudoToken | None) -> None:
        """Code the new keys, keep the true queries for the next basis, and give the pseudo token the mean key's logit.

        A predicted query may differ from the true one by what all keys have in common: a bias of Qwen2.5's queries
        does, so that the pseudo token's weight would be off by a factor beside the keys that are read.
        """
        backend = fastest(batch.backend, batch.query_BHGD.device, batch.key_PHND, batch.value_PHNE)
        rows = batch.block_table_BP, batch.descriptor, batch.kept
        code_tokens.on(backend)(batch.key_PHND, *rows, batch.query_BHGD, pseudo, batch.scale)

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """Say whether to learn a basis: there are more candidates than the budget, and none or an old one."""
        aged = state.length - note.get("learned", -RELEARN) >= RELEARN
        return aged and self._room(state) > self.config.budget

    def selection_tokens(self, state: RequestState) -> float:
        """See `choosing_tokens`."""
        if not self.key_width or self._room(state) <= self.config.budget:
            return 0.0
        return choosing_tokens(state.length, self.key_width) + bool(self.config.codescan.rest)

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Count the codes, the basis, the queries kept, the sum of values and up to which position it goes."""
        channels = SLOTS * words(layer.key_width)
        numbers = capacity * words(layer.key_width) + layer.key_width * (2 * channels + 1) + layer.value_width + 1
        queries = KEPT * layer.query_heads * layer.key_width * layer.itemsize
        return layer.heads * numbers * torch.float32.itemsize + queries

    def first_bytes(self, layer: LayerShape) -> int:
        """Count the keys that are coded: as they are, in float32, and less their mean."""
        return layer.heads * layer.key_width * (layer.itemsize + 2 * torch.float32.itemsize)

    def _room(self, state: RequestState) -> int:
        return state.recent_start - state.sink(self.config.sink)

    def _learn(self, context: LayerContext, place: int, note: Notes) -> None:
        with context.span("code_basis"):
            state, codes, again = context.states[place], context.kept[place], "learned" in note
            query_HWGD = context.query_BHGWD[place].transpose(1, 2)
            recent_HXGD = codes.recent_BHXGD[0]
            if not again:  # the prompt's last queries, by position modulo `KEPT`; zeros count for nothing
                recent_HXGD.zero_()
                W = query_HWGD.shape[1]
                for at in range(max(0, W - KEPT), W):
                    recent_HXGD[:, (state.length - W + at) % KEPT] = query_HWGD[:, at]
            key_HTD = context.keys(place, 0, state.length)[0]
            queries = recent_HXGD if again else query_HWGD
            first = state.sink(self.config.sink)
            basis = learn_basis(key_HTD[:, first:], queries.flatten(1, 2))
            note["learned"] = state.length
            codes.learn(0, basis)
            encode = encode_keys.on(fastest(context.backend, key_HTD.device))
            codes.word_BHWT[0, :, :, : state.length] = encode(key_HTD, basis)
            if not again:
                codes.summed_BH.zero_()
                if not context.whole_on_device:  # later steps find only the recent values there
                    value_HTE = context.values(place, first, state.recent_start)[0]
                    codes.sum_BHE[0] = value_HTE.float().sum(1)
                    codes.summed_BH.fill_(state.recent_start)


def choosing_tokens(length: float, width: int) -> float:
    """Count what choosing among `length` tokens reads, in tokens, but for the pseudo token's value.

    That is each token's words (one of 16-bit keys and values is as many as a head is wide), the projections of query
    and new key, and all keys where the basis is learned again.
    """
    return words(width) * (length / width + SLOTS) + length / 2 / RELEARN


# by bits: the step, in standard deviations, of the best uniform quantizer of a normal variable
STEP = {1: 1.596, 2: 0.9957, 4: 0.3352}
KEYS = 2048  # fewer than twice as many are looked at, which is enough for a covariance
# shares of the mean variance that are added in all directions: to the queries', and to tell directions apart
RIDGE, FLOOR = 1e-2, 1e-5
# of the iteration: with 6 to 20 the codes of SmolLM2-135M miss as much attention as with exact eigenvectors
ROUNDS = 8


def learn_basis(key_HTD: torch.Tensor, query_HND: torch.Tensor) -> CodeBasis:
    """Find the basis that keeps most of the variance of q . k in the fewest channels.

    With the second moment of the queries L L^T and the covariance of the keys C, the channels are the leading
    eigenvectors U of L^T C L: keys are projected by L U and queries by L^-T U, so that the products over all channels
    add up to q . k. Quantization assumes normal keys in each channel. The host does not wait, as it would for
    PyTorch's eigenvectors. Keys, without the sinks, and queries of each KV head's group are after rotary embedding.
    """
    key_HTD = key_HTD[:, :: max(1, key_HTD.shape[1] // KEYS)].float()
    query_HND = query_HND.float()
    D = key_HTD.shape[-1]
    mean_HD = key_HTD.mean(1)
    centered_HTD = key_HTD - mean_HD[:, None]
    moment_HDD = _ridged(query_HND.mT @ query_HND / query_HND.shape[1], RIDGE)
    root_HDD, _ = torch.linalg.cholesky_ex(moment_HDD)
    covariance_HDD = centered_HTD.mT @ centered_HTD / centered_HTD.shape[1]
    factor_C = _factors(D, key_HTD.device)
    leading_HDC = _leading(root_HDD.mT @ covariance_HDD.double() @ root_HDD, len(factor_C))
    encode_HDC = (root_HDD @ leading_HDC).float()
    query_HDC = torch.linalg.solve_triangular(root_HDD.mT, leading_HDC, upper=True).float()
    deviation_HC = (centered_HTD @ encode_HDC).square().mean(1).sqrt()
    step_H1C = (deviation_HC * factor_C).clamp_min(torch.finfo().eps)[:, None]
    return CodeBasis(mean_HD, encode_HDC / step_H1C, query_HDC * step_H1C)


@cache
def _factors(D: int, device: torch.device) -> torch.Tensor:
    # the channels' steps in standard deviations; cached because a copy to the device waits
    return torch.tensor([STEP[bits] for bits in bits_of(D)], device=device)


def _ridged(square_HDD: torch.Tensor, share: float) -> torch.Tensor:
    # in float64, with `share` of the mean diagonal added to it
    diagonal_HD = square_HDD.diagonal(dim1=1, dim2=2)
    ridge_H1 = (share * diagonal_HD.mean(1, keepdim=True)).clamp_min(torch.finfo().tiny)
    return square_HDD.double() + torch.diag_embed(ridge_H1.expand_as(diagonal_HD).double())


def _leading(variance_HDD: torch.Tensor, count: int) -> torch.Tensor:
    # orthonormal directions of the largest variance, in order, [H, D, count], by orthogonal iteration from cosines
    variance_HDD = _ridged(variance_HDD, FLOOR)
    D = variance_HDD.shape[-1]
    place_D = torch.arange(D, dtype=torch.float64, device=variance_HDD.device)
    basis_HDC = torch.outer((place_D + 0.5) * (math.pi / D), place_D[:count]).cos().expand(len(variance_HDD), -1, -1)
    for _ in range(ROUNDS):
        basis_HDC = variance_HDD @ basis_HDC
        size_HCC, _ = torch.linalg.cholesky_ex(basis_HDC.mT @ basis_HDC)
        basis_HDC = torch.linalg.solve_triangular(size_HCC.mT, basis_HDC, upper=True, left=False)
    order_HC = (basis_HDC * (variance_HDD @ basis_HDC)).sum(1).argsort(descending=True)
    basis_HDC = basis_HDC.take_along_dim(order_HC[:, None], 2)
    return torch.nn.functional.pad(basis_HDC, (0, count - basis_HDC.shape[-1]))
