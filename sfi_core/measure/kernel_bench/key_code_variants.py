"""Variants of key codes: code all keys, score all keys, and PyTorch's product as a rival.

They are checked against levels and logits in float64, without our kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sfi_core.measure.kernel_bench import bytes_moved
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.gates import share
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_kernels.key_codes import CodeBasis, bits_of, encode_keys, scan_codes, words
from sfi_kernels.key_codes.layout import BITS

COVERED = 2.5  # a channel's levels cover so many standard deviations on either side of the mean


def key_code_variants(settings: KernelSettings, data: LayerData, backend: str) -> Iterator[KernelVariant]:
    """Yield the variants; a call runs the op once for every request, as a decoding step does."""
    basis = draw_basis(settings, data.length_B.device)
    encode = partial(_encode, data, basis, backend)
    codes = encode()
    if "encode_keys" in settings.ops:
        moved = bytes_moved.encode_bytes(settings, _code_bytes(settings, backend))

        def error() -> float:
            pairs = zip(data.key_BHTD, encode(), strict=True)
            return max(encode_error(key, code, basis) for key, code in pairs)

        yield KernelVariant("encode_keys", None, encode, moved, error)
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
    settings: KernelSettings, data: LayerData, basis: CodeBasis, codes: list[torch.Tensor], backend: str
) -> Iterator[KernelVariant]:
    scan, query_BHGD = scan_codes.on(backend), data.query_BHGD
    level_BHCT = [levels(code).float() for code in codes]
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
        return max(scan_error(*row, basis, settings.scale) for row in rows)

    for name, call, code_bytes in (
        ("scan_codes", scanned, _code_bytes(settings, backend)),
        ("scan_codes.plain", plain, bytes_moved.channels(settings) * level_BHCT[0].element_size()),
    ):
        moved = bytes_moved.scan_bytes(settings, code_bytes)
        yield KernelVariant(name, None, call, moved, partial(error, call))


def levels(code: torch.Tensor) -> torch.Tensor:
    """Return a code's levels, [H, C, T] int64, from bytes (PyTorch) or from the bits of words (Triton)."""
    if code.dtype == torch.uint8:
        return code.long()
    rest, fields = code.long() % 2**32, []
    for bits in BITS:
        fields.append(rest % 2**bits)
        rest = rest // 2**bits
    return torch.stack(fields, 1).flatten(1, 2)  # by slot, then by word


def encode_error(key_HTD: torch.Tensor, code: torch.Tensor, basis: CodeBasis) -> float:
    """Compare each key's channel with the interval of its level.

    Within rounding of an edge, either level is right. A float32 product of D differences is off by D + 3
    roundings of the sum of its terms' sizes.
    """
    mean, encode = basis.mean_HD.double(), basis.encode_HDC.double()
    key = key_HTD.double()
    step_HTC = (key - mean[:, None]) @ encode
    sizes = (key.abs() + mean.abs()[:, None]) @ encode.abs()
    bound = (key.shape[-1] + 3) * torch.finfo(torch.float32).eps * sizes
    level_HTC = levels(code).mT
    most_C = 2 ** torch.tensor(bits_of(key.shape[-1]), device=key.device) - 1
    low = level_HTC - (most_C + 1) / 2
    below = (low - step_HTC).masked_fill(level_HTC == 0, 0.0).clamp_min(0)
    above = (step_HTC - low - 1).masked_fill(level_HTC == most_C, 0.0).clamp_min(0)
    return share(below + above, bound)


def scan_error(
    logits_HGT: torch.Tensor, query_HGD: torch.Tensor, code: torch.Tensor, basis: CodeBasis, scale: float
) -> float:
    """Compare logits with the product of the query and the middles of the levels' intervals.

    A product of D terms, a product of C terms and their sum are off by as many roundings of the sum of the
    terms' sizes.
    """
    query, mean, project = (x.double() for x in (query_HGD, basis.mean_HD, basis.query_HDC))
    bits_C1 = torch.tensor(bits_of(query.shape[-1]), device=query.device)[:, None]
    half_C1 = 2.0 ** (bits_C1.double() - 1)
    level_HCT = levels(code).double()
    expected = query @ mean[..., None] + query @ project @ (level_HCT + 0.5 - half_C1)
    # an implementation may multiply the levels and their middle separately
    sizes = query.abs() @ mean.abs()[..., None]
    sizes = sizes + query.abs() @ project.abs() @ (level_HCT + half_C1)
    terms = query.shape[-1] + len(bits_C1) + 4
    bound = terms * torch.finfo(torch.float32).eps * sizes * scale
    return share((logits_HGT - expected * scale).abs(), bound)
