"""CodeScan, a method of ours: every step scores all keys by short codes and reads the best keys exactly.

At the end of the prompt each KV head learns the directions in which the prompt's last queries tell its keys
apart (`code_basis`). Each key is coded in that basis, in words (`sfi_kernels.key_codes`). After every
`RELEARN` tokens the basis is learned again, from the queries since then, because rotary positions turn them
out of it: after 1,500 tokens without that, SmolLM2-135M missed half of the attention. A step estimates
the logits of all keys from the codes and reads the keys with the highest probability, the mean over the
queries of the KV head. A pseudo token with the mean value stands for the unread keys; its weight is
`codescan.rest` of their estimated weight.

Its parts are known. Basis: KQ-SVD (arXiv 2512.05916) has this optimum, ours is centred; LRQK factors prompt
queries and keys at rank 32; Loki (Singhania et al., 2024) takes keys alone. Graded bits: SVDq (2502.15304),
to compress. Scans of few bits: FIER (2508.08256), Adamas (2510.18413), Self-Indexing KVCache (2603.14224),
PQCache (Zhang et al., 2024), HATA (Gong et al., 2025, trained). ParisKV (ICML 2026) argues that what is
learned from a prompt drifts. SparQ (Ribar et al., 2024) has the pseudo token, with all of the weight. Ours is
the union: graded bits in a basis of the prompt's queries and keys, scanned at every step without training,
and a pseudo token for a share of the rest.
"""

from typing import ClassVar

import torch

from sfi_core.policies.base import BatchContext, LayerContext, Notes, Policy, Selection, stacked
from sfi_core.policies.code_basis import learn_basis
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.request import RequestState
from sfi_kernels import key_codes
from sfi_kernels.code_scan import KEPT, TOLD, Choice, code_scan, code_tokens, told_of
from sfi_kernels.code_scan.reference import nothing_unread
from sfi_kernels.pseudo_token import PseudoToken

SPARE = 64  # additional tokens when the buffer of codes grows
QUERIES = 256  # the last queries of the prompt, which the basis is learned from
RELEARN = KEPT  # tokens of a request until it is learned again


class CodeScan(Policy):
    """Every step selects anew by the codes of all keys."""

    fills = True
    prompt_only = True  # a lossless run keeps the prompt's basis too
    drafts = True
    offloads = True
    fixed: ClassVar = {"recent_mode": "sliding", "window_prefill": QUERIES}  # every step selects

    def select_after(self, context: LayerContext) -> None:
        """Learn the basis at the end of the prompt; select nothing yet."""
        for place, note in enumerate(context.notes):
            self._learn(context, place, note)

    def select_before(self, context: LayerContext) -> Selection:
        """Select by the current query."""
        chosen = [self._select(context, place) for place in range(len(context.notes))]
        index, logit, value, told = zip(*chosen, strict=True)
        pseudo = None
        if self.config.codescan.rest:
            pseudo = PseudoToken(torch.stack(logit), torch.stack(value))
        wanted = [told_HC for told_HC in told if told_HC is not None]
        diagnostics = dict(zip(TOLD, torch.stack(wanted).unbind(-1), strict=True)) if wanted else {}
        return Selection(stacked(index), diagnostics, pseudo=pseudo)

    def choose(self, batch: BatchContext) -> Choice | None:
        """Choose by the current queries; code the new keys in any case."""
        device, pages = batch.query_BHGD.device, (batch.key_PHND, batch.value_PHNE)
        rows = batch.block_table_BP, batch.descriptor
        if not batch.fast:
            code_tokens.fastest(batch.backend, device)(batch.key_PHND, *rows, batch.codes)
            return None
        self.key_width = batch.query_BHGD.shape[3]
        budget = min(self.config.budget, batch.codes.word_BHWT.shape[3])
        return code_scan.fastest(batch.backend, device)(
            batch.query_BHGD, *pages, *rows, batch.codes, batch.position_BHS, batch.length_BH, budget=budget,
            scale=batch.scale, rest=self.config.codescan.rest, told=batch.wants_diagnostics,
        )  # fmt: skip

    def lacks(self, state: RequestState, note: Notes) -> bool:
        """Say whether to learn a basis: there are more candidates than the budget, and none or an old one."""
        aged = state.length - note.get("learned", -RELEARN) >= RELEARN
        return aged and self._room(state) > self.config.budget

    def rewind(self, note: Notes, length: int) -> None:
        """Drop the codes of positions >= `length`, and the sum of values if it includes such a position."""
        note["coded"] = min(note.get("coded", 0), length)
        if note.get("summed", 0) > length:
            del note["sum"], note["summed"]

    def selection_tokens(self, state: RequestState) -> float:
        """See `choosing_tokens`."""
        if not self.key_width or self._room(state) <= self.config.budget:
            return 0.0
        return choosing_tokens(state.length, self.key_width) + bool(self.config.codescan.rest)

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        """Count the codes (at most a byte per channel), the basis, the queries kept and the sum of values."""
        channels = key_codes.SLOTS * key_codes.words(layer.key_width)
        basis = layer.key_width * (2 * channels + 1) + layer.value_width
        kept = KEPT * layer.query_heads * layer.key_width * layer.itemsize
        numbers = basis * torch.float32.itemsize
        return layer.heads * ((capacity + SPARE) * channels + numbers) + kept

    def first_bytes(self, layer: LayerShape) -> int:
        """Count the keys that are coded: as they are, in float32, and less their mean."""
        return layer.heads * layer.key_width * (layer.itemsize + 2 * torch.float32.itemsize)

    def _room(self, state: RequestState) -> int:
        return state.recent_start - state.sink(self.config.sink)

    def _learn(self, context: LayerContext, place: int, note: Notes) -> None:
        with context.span("code_basis"):
            state, again = context.states[place], "basis" in note
            codes = context.codes[place] if context.codes else None
            query_HWGD = context.query_BHGWD[place].transpose(1, 2)
            if not again:
                note["recent"] = _ring(query_HWGD, state.length)
                if codes is not None:
                    note["recent"] = codes.recent_BHXGD[0].copy_(note["recent"])
            key_HTD = context.keys(place, 0, state.length)[0]
            queries = note["recent"] if again else query_HWGD
            first = state.sink(self.config.sink)
            basis = note["basis"] = learn_basis(key_HTD[:, first:], queries.flatten(1, 2))
            note["learned"], note["coded"] = state.length, 0
            if codes is not None:
                codes.learn(0, basis)
                encode = key_codes.encode_keys.fastest(context.backend, key_HTD.device)
                codes.word_BHWT[0, :, :, : state.length] = encode(key_HTD, basis)
                if not again:
                    codes.summed_BH.zero_()

    def _select(
        self, context: LayerContext, place: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        # returns positions [H, K], the pseudo token's logit [H, G] and value [H, E], and what a trace wants
        state, note = context.states[place], context.notes[place]
        query_HGD = context.query_BHGWD[place, :, :, -1]
        H, G, self.key_width = query_HGD.shape
        if self.lacks(state, note):
            self._learn(context, place, note)
        if "recent" in note:
            note["recent"][:, (state.length - 1) % KEPT] = query_HGD
        first, count = state.sink(self.config.sink), self._room(state)
        mean_HE = self._mean_value(context, place)
        if count <= self.config.budget:  # everything is read
            index_HK = torch.arange(first, first + count, device=query_HGD.device).expand(H, -1)
            told_HC = nothing_unread(1, H, query_HGD.device)[0] if context.wants_diagnostics else None
            return index_HK, mean_HE.new_full((H, G), -torch.inf), mean_HE, told_HC
        with context.span("scan"):
            code_HXT = self._codes(context, place)[..., first : first + count]
            scan = key_codes.scan_codes.fastest(context.backend, query_HGD.device)
            logits_HGT = scan(query_HGD, code_HXT, note["basis"], scale=context.scale)
        scored_HGT = logits_HGT.clone() if context.wants_diagnostics else None  # choosing may overwrite them
        with context.span("top_k"):
            choose = key_codes.choose_likeliest.fastest(context.backend, query_HGD.device)
            rest, budget = self.config.codescan.rest, self.config.budget
            index_HK, unread_HG = choose(logits_HGT, budget, rest=rest)
        told_HC = None if scored_HGT is None else told_of(scored_HGT, index_HK)
        return index_HK.add_(first), unread_HG, mean_HE, told_HC

    def _codes(self, context: LayerContext, place: int) -> torch.Tensor:
        # the codes of all cached keys, [H, X, T]; new keys are coded now
        state, note = context.states[place], context.notes[place]
        known, length = note.get("coded", 0), state.length
        basis: key_codes.CodeBasis = note["basis"]
        key_HTD = context.keys(place, known, length)[0]
        new = key_codes.encode_keys.fastest(context.backend, key_HTD.device)(key_HTD, basis)
        if "codes" not in note or note["codes"].shape[2] < length:
            note["codes"] = _larger(note.get("codes"), new, length)
        codes: torch.Tensor = note["codes"]
        codes[..., known:length] = new
        note["coded"] = length
        return codes[..., :length]

    def _mean_value(self, context: LayerContext, place: int) -> torch.Tensor:
        # the mean value of J, float32, from a running sum
        state, note = context.states[place], context.notes[place]
        first, stop = state.sink(self.config.sink), state.recent_start
        known = note.get("summed", first)
        if stop > known or "sum" not in note:
            new_HE = context.values(place, known, stop)[0].float().sum(1)
            note["sum"], note["summed"] = note.get("sum", 0.0) + new_HE, stop
        mean: torch.Tensor = note["sum"] / max(1, note["summed"] - first)
        return mean


def choosing_tokens(length: float, width: int) -> float:
    """Count what choosing among `length` tokens reads, in tokens, but for the pseudo token's value.

    That is each token's words and the projections of query and new key; learning the basis again reads all keys. A
    token of 16-bit keys and values is as many words as a head is wide.
    """
    return key_codes.words(width) * (length / width + key_codes.SLOTS) + length / 2 / RELEARN


def _larger(old: torch.Tensor | None, new: torch.Tensor, length: int) -> torch.Tensor:
    # a buffer for codes such as `new`, of `length` tokens and some more, with the old codes
    codes = new.new_empty(*new.shape[:2], length + SPARE)
    if old is not None:
        codes[..., : old.shape[2]] = old
    return codes


def _ring(query_HWGD: torch.Tensor, length: int) -> torch.Tensor:
    # the last queries of a prompt of `length` tokens, by position modulo `KEPT`; zeros count for nothing
    H, W, G, D = query_HWGD.shape
    ring_HXGD = query_HWGD.new_zeros(H, KEPT, G, D)
    for place in range(max(0, W - KEPT), W):
        ring_HXGD[:, (length - W + place) % KEPT] = query_HWGD[:, place]
    return ring_HXGD
