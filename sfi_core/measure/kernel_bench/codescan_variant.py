"""The variant of a codescan step: choose by the codes of all keys, and read the chosen rows in place."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData, Selected, step_plan
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.attention_in_place import attention_in_place
from sfi_kernels.code_scan import BatchCodes, code_scan
from sfi_kernels.code_scan.reference import encoded, scanned
from sfi_kernels.decode_attention import decode_attention
from sfi_kernels.key_codes import CodeBasis, bits_of
from sfi_kernels.step_descriptor import FAST, NewRows

TIED = 1 + 2**-3  # what a key may exceed another by with the same score
ROUNDED = 1e-3  # of a probability
CODED = 0.9  # of the new keys' words; at a level's edge rounding decides
COVERED = 2.5  # a channel's levels cover so many standard deviations on either side of the mean


def codescan_variant(
    settings: KernelSettings, data: LayerData, selected: Selected, retention: float, backend: str
) -> Iterator[KernelVariant]:
    """Yield the variant: all launches of a layer's step, for a batch of equal requests.

    It appends the last token again, so that the cache stays the same. The pseudo token has no weight, so
    that the textbook's attention to the chosen rows is the right one.
    """
    device, budget = data.length_B.device, settings.budget(retention)
    plan = step_plan(settings, backend, device, mode=FAST, packed=settings.sink + budget)
    last_key, last_value = (x[:, :, -1:].clone() for x in (data.key_BHTD, data.value_BHTD))
    plan = replace(plan, new=NewRows(last_key, last_value, data.pages.value_PHNE, data.pages.norm_PHN))
    codes = BatchCodes.empty(settings.batch, data.query_BHGD.shape[2], *data.paged[:2], settings.context)
    basis = _draw_basis(settings, device)
    for row, key_HTD in enumerate(data.key_BHTD):
        codes.learn(row, basis)
        codes.word_BHWT[row] = encoded(key_HTD, codes, row)
    position, length = selected.position_BHS.clone(), selected.length_BH.clone()
    nothing = [pages.new_empty(*length.shape, 0, pages.shape[3]) for pages in data.paged[:2]]
    operands: tuple[Any, ...] = (*nothing, length, *data.paged, plan)
    first, stop, query = settings.sink, settings.context - settings.recent, data.query_BHGD

    def call() -> torch.Tensor:
        options: dict[str, Any] = {"scale": settings.scale}
        choice = code_scan.fastest(backend, device)(
            query, *data.paged, plan, codes, position, length, **options, budget=budget, rest=0.0
        )
        options["pseudo"] = choice.pseudo
        if backend == "torch":
            where = position, length, *data.paged, data.recent_start_B, data.length_B
            return attention_in_place.fastest(backend, device)(query, *where, **options)
        result = decode_attention.on(backend)(query[:, :, :, None], *operands, **options, position_BHS=position)
        return result.out_BHGWE[:, :, :, 0]

    known = codes.word_BHWT[..., -1].clone()

    def error() -> float:
        codes.word_BHWT[..., -1] = 0
        out_BHGD = call()
        if (codes.word_BHWT[..., -1] == known).float().mean() < CODED:
            return gates.WRONG
        index = position[:, :, first:]
        for row, query_HGD in enumerate(data.query_BHGD):
            logits_HGT = scanned(query_HGD, codes, row, settings.scale)[..., first:stop]
            weight_HT = logits_HGT.softmax(-1).mean(1)
            chosen_HT = torch.zeros_like(weight_HT, dtype=torch.bool)
            chosen_HT.scatter_(1, (index[row] - first).long(), True)
            least = weight_HT.masked_fill(~chosen_HT, torch.inf).amin(1)
            most = weight_HT.masked_fill(chosen_HT, 0.0).amax(1).clamp_min(2.0**-32)
            whole = (chosen_HT.sum(1) == budget).all() and (length[row] == first + budget).all()
            if not (whole and (least.clamp_min(2.0**-32) * TIED * (1 + ROUNDED) >= most).all()):
                return gates.WRONG
        read = gates.attended(index, first, stop, settings.context)
        expected = gates.textbook(data.query_BHGD, data.key_BHTD, data.value_BHTD, settings.scale, read)
        return expected.error(out_BHGD)

    moved = bytes_moved.codescan_bytes(settings, settings.attended(retention))
    yield KernelVariant("codescan", retention, call, moved, error)


def _draw_basis(settings: KernelSettings, device: torch.device) -> CodeBasis:
    """Draw random directions; each channel's levels cover `COVERED` standard deviations of its keys."""
    generator = torch.Generator(device).manual_seed(settings.seed + 2)
    H, D = settings.kv_heads, settings.head_dim
    direction = torch.randn(H, D, len(bits_of(D)), generator=generator, device=device)
    direction /= direction.norm(dim=1, keepdim=True)
    step_C = torch.tensor([2 * COVERED / 2**bits for bits in bits_of(D)], device=device)
    mean = torch.randn(H, D, generator=generator, device=device) / 4
    return CodeBasis(mean, direction / step_C, direction * step_C)
