"""Gumbel noise for sampling: a function of seed, request, token index and token id, without a state.

Seed, request and index are hashed to a key. Token id v takes output v of the generator SplitMix64 seeded with the key
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), which computes each output by itself
and passes BigCrush. The integers are the same on every device; logarithms may differ in the last bit of a float64.
"""

from hashlib import blake2b

import torch

BITS = 64
KEPT = 52  # of the 64 bits: adding half of 2**-52 is exact and stays below 1


def _signed(number: int) -> int:
    return number - 2**BITS if number >> (BITS - 1) else number


GOLDEN = _signed(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
MIXER = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def noise_key(seed: int, request: int, index: int) -> int:
    """Return the key of generated token `index` of a request: 64 bits, signed."""
    name = f"{seed} {request} {index}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little", signed=True)


def random_bits(key_X: torch.Tensor, size: int) -> torch.Tensor:
    """Return 64 random bits for each key and token id: [X, size], int64, on the keys' device."""
    counter_V = torch.arange(1, size + 1, device=key_X.device) * GOLDEN
    bits_XV = key_X[:, None] + counter_V
    for shift, factor in MIXER:
        bits_XV ^= (bits_XV >> shift).bitwise_and_(2 ** (BITS - shift) - 1)
        bits_XV *= factor
    return bits_XV


def gumbel(key_X: torch.Tensor, size: int) -> torch.Tensor:
    """Return -log(-log(u)), u uniform in (0, 1), for each key and token id: [X, size], float64, finite.

    The arg max of log probability plus noise is a sample by probability (Gumbel, 1954).
    """
    bits_XV = random_bits(key_X, size) >> (BITS - KEPT)
    uniform_XV = bits_XV.bitwise_and_(2**KEPT - 1).double().add_(0.5).mul_(2.0**-KEPT)
    return uniform_XV.log_().neg_().log_().neg_()
