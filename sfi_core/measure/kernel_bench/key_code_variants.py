"""Variants of key codes: code all keys, score all keys, and PyTorch's product as a rival."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sfi_core.measure.kernel_bench import bytes_moved, key_code_gates
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.key_codes import CodeBasis, bits_of, encode_keys, scan_codes, words

COVERED = 2.5  # a channel's levels cover so many standard deviations on either side of the mean


def key_code_variants(
    settings: KernelSettings, data: LayerData, backend: str
) -> Iterator[KernelVariant]:
    """Yield the variants; a call runs the op once for every request, as a decoding step does."""
    basis = draw_basis(settings, data.length_B.device)
    encode = partial(_encode, data, basis, backend)
    codes = encode()
    if "encode_keys" in settings.ops:
        moved = bytes_moved.encode_bytes(settings, _code_bytes(settings, backend))

        def encode_error() -> float:
            pairs = zip(data.key_BHTD, encode(), strict=True)
            return max(key_code_gates.encode_error(key, code, basis) for key, code in pairs)

        yield KernelVariant("encode_keys", None, encode, moved, encode_error)
    if "scan_codes" in settings.ops:
        yield from _scans(settings, data, basis, codes, backend)


def draw_basis(settings: KernelSettings, device: torch.device) -> CodeBasis:
    """Draw random directions; each channel's levels cover `COVERED` standard deviations of its keys."""
    generator = torch.Generator(device).manual_seed(settings.seed + 2)
    H, D = settings.kv_heads, settings.head_dim
    direction = torch.randn(H, D, len(bits_of(D)), generator=generator, device=device)
    direction /= direction.norm(dim=1, keepdim=True)
    step_C = torch.tensor([2 * COVERED / 2**bits for bits in bits_of(D)], device=device)
    mean = torch.randn(H, D, generator=generator, device=device) / 4
    return CodeBasis(mean, direction / step_C, direction * step_C)


def _code_bytes(settings: KernelSettings, backend: str) -> int:
    # of a key: words, or a byte a channel
    if backend == "triton":
        return words(settings.head_dim) * bytes_moved.INT32
    return bytes_moved.channels(settings)


def _encode(data: LayerData, basis: CodeBasis, backend: str) -> list[torch.Tensor]:
    encode = encode_keys.on(backend)
    return [encode(key, basis) for key in data.key_BHTD]


def _scans(
    settings: KernelSettings,
    data: LayerData,
    basis: CodeBasis,
    codes: list[torch.Tensor],
    backend: str,
) -> Iterator[KernelVariant]:
    scan, query_BHGD = scan_codes.on(backend), data.query_BHGD
    level_BHCT = [key_code_gates.levels(code).float() for code in codes]
    bits_C1 = torch.tensor(bits_of(settings.head_dim), device=query_BHGD.device)[:, None]
    half_C1 = 2.0 ** (bits_C1 - 1)

    def scanned() -> list[torch.Tensor]:
        pairs = zip(query_BHGD, codes, strict=True)
        return [scan(query, code, basis, scale=settings.scale) for query, code in pairs]

    def plain() -> list[torch.Tensor]:
        logits = []
        for query, level_HCT in zip(query_BHGD, level_BHCT, strict=True):
            query_HGD = query.float() * settings.scale
            query_HGC = query_HGD @ basis.query_HDC
            constant_HG1 = query_HGD @ basis.mean_HD[..., None] + query_HGC @ (0.5 - half_C1)
            logits.append((query_HGC @ level_HCT).add_(constant_HG1))
        return logits

    def error(call: Callable[[], list[torch.Tensor]]) -> float:
        rows = zip(call(), query_BHGD, codes, strict=True)
        return max(key_code_gates.scan_error(*row, basis, settings.scale) for row in rows)

    for name, call, code_bytes in (
        ("scan_codes", scanned, _code_bytes(settings, backend)),
        ("scan_codes.plain", plain, bytes_moved.channels(settings) * level_BHCT[0].element_size()),
    ):
        moved = bytes_moved.scan_bytes(settings, code_bytes)
        yield KernelVariant(name, None, call, moved, partial(error, call))
