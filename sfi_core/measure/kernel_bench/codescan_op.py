"""The variant of a codescan step: choose by the codes of all keys, and read the chosen rows in place."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from sfi_core.measure.kernel_bench import bytes_moved, gates
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.attention_in_place import attention_in_place
from sfi_kernels.code_scan import BatchCodes, CodeBasis, bits_of, code_scan, encode_keys
from sfi_kernels.code_scan.reference import scanned
from sfi_kernels.numpy_views import fastest
from sfi_kernels.step_descriptor import FAST, NewRows

TIED = 1 + 2**-3  # what a key may exceed another by with the same score
ROUNDED = 1e-3  # of a probability
CODED = 0.9  # of the new keys' words; at a level's edge rounding decides
COVERED = 2.5  # a channel's levels cover so many standard deviations on either side of the mean


def codescan(layer: LayerData, retention: float) -> Iterator[KernelVariant]:
    """Yield all launches of a layer's step, for a batch of equal requests.

    It appends the last token again, so that the cache stays the same. The pseudo token has no weight, so
    that the textbook's attention to the chosen rows is the right one.
    """
    settings, backend, device, query = layer.settings, layer.backend, layer.device, layer.query_BHGD
    budget, selected = settings.budget(retention), layer.selected[retention]
    implementation = fastest(backend, device, *layer.paged[:2])
    last_key, last_value = (x[:, :, -1:].clone() for x in (layer.key_BHTD, layer.value_BHTD))
    new = NewRows(last_key, last_value, layer.pages.value_PHNE, layer.pages.norm_PHN)
    plan = replace(layer.plan(mode=FAST, packed=settings.sink + budget), new=new)
    codes = BatchCodes.empty(settings.batch, settings.group, *layer.paged[:2], settings.context)
    basis = _draw_basis(layer)
    for row, key_HTD in enumerate(layer.key_BHTD):
        codes.learn(row, basis)
        codes.word_BHWT[row] = encode_keys.reference(key_HTD, basis)
    position, length = selected.position_BHS.clone(), selected.length_BH.clone()
    nothing = [pages.new_empty(*length.shape, 0, settings.head_dim) for pages in layer.paged[:2]]

    def call() -> torch.Tensor:
        options: dict[str, Any] = {"scale": settings.scale}
        choice = code_scan.on(implementation)(
            query, *layer.paged, plan, codes, position, length, **options, budget=budget, rest=0.0
        )
        options["pseudo"] = choice.pseudo
        if backend == "torch":
            where = position, length, *layer.paged, layer.recent_start_B, layer.length_B
            return attention_in_place.on(implementation)(query, *where, **options)
        return layer.attended(plan, *nothing, length, pseudo=choice.pseudo, position_BHS=position)()

    known = codes.word_BHWT[..., -1].clone()

    def error() -> float:
        codes.word_BHWT[..., -1] = 0
        out_BHGD, index = call(), position[:, :, settings.sink :]
        coded = float((codes.word_BHWT[..., -1] == known).float().mean())
        whole = (length == settings.sink + budget).all()
        rows = range(settings.batch)
        if coded < CODED or not whole or not all(_best_chosen(layer, codes, row, index[row]) for row in rows):
            return gates.WRONG
        read = layer.packed_index(selected._replace(index_BHK=index), recent=True)
        return layer.textbook(read).error(out_BHGD)

    moved = bytes_moved.codescan_bytes(settings, settings.attended(retention))
    yield KernelVariant("codescan", retention, call, moved, error)


def _best_chosen(layer: LayerData, codes: BatchCodes, row: int, index_HK: torch.Tensor) -> bool:
    # whether no candidate of a request that was left out has a larger weight by its code than a chosen one
    settings = layer.settings
    first, stop = settings.sink, settings.context - settings.recent
    logits_HGT = scanned(layer.query_BHGD[row], codes, row, settings.scale)[..., first:stop]
    weight_HT = logits_HGT.softmax(-1).mean(1).clamp_min(2.0**-32)
    chosen_HT = torch.zeros_like(weight_HT, dtype=torch.bool)
    chosen_HT.scatter_(1, (index_HK - first).long(), True)
    least = weight_HT.masked_fill(~chosen_HT, torch.inf).amin(1)
    most = weight_HT.masked_fill(chosen_HT, 2.0**-32).amax(1)
    right = (chosen_HT.sum(1) == index_HK.shape[1]) & (least * TIED * (1 + ROUNDED) >= most)
    return bool(right.all())


def _draw_basis(layer: LayerData) -> CodeBasis:
    """Draw random directions; each channel's levels cover `COVERED` standard deviations of its keys."""
    H, D = layer.settings.kv_heads, layer.settings.head_dim
    direction = layer.draw(H, D, len(bits_of(D)), dtype=torch.float32)
    direction /= direction.norm(dim=1, keepdim=True)
    step_C = torch.tensor([2 * COVERED / 2**bits for bits in bits_of(D)], device=layer.device)
    mean = layer.draw(H, D, dtype=torch.float32) / 4
    return CodeBasis(mean, direction / step_C, direction * step_C)
