"""The codes of keys: 16 channels in each 32-bit word, more bits for the channels that matter most.

A channel is a projection of the key. Its level n, 0 to 2^bits - 1, stands for (n + 0.5 - 2^(bits - 1)) steps.
A key has W words with the same slots; slot s begins at bit `SHIFTS[s]`. The C = 16 W channels are in the
order of their ranks: slot s of word w holds channel s * W + w.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import pad

BITS = (4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1)  # of a word's slots
SLOTS = len(BITS)
WIDTHS = (64, 128)  # a head wider than each has twice as many words
SHIFTS = tuple(accumulate(BITS, initial=0))[:-1]
KEPT = 128  # tokens whose queries are kept for learning a basis again
DROPPED, LOWEST = 20, (127 - 32) << 3  # of a float32's bits: those that a score drops, and the score of 2^-32


class CodeBasis(NamedTuple):
    """The projections of a layer's keys and queries to channels, by KV head; float32.

    `mean_HD` is subtracted from keys before they are coded. `encode_HDC` gives the keys' channels in steps of
    the channel, `query_HDC` those of queries times the channel's step.
    """

    mean_HD: torch.Tensor
    encode_HDC: torch.Tensor
    query_HDC: torch.Tensor


def by_word(basis_HDC: torch.Tensor) -> torch.Tensor:
    """Return projections to channels by word, [H, W, D, slots]."""
    return basis_HDC.reshape(*basis_HDC.shape[:2], SLOTS, -1).permute(0, 3, 1, 2)


def words(D: int) -> int:
    """Return W, the words of a key D numbers wide: 1 up to 64, 2 up to 128, 4 beyond."""
    return 1 << sum(width < D for width in WIDTHS)


def bits_of(D: int) -> tuple[int, ...]:
    """Return the bits of each channel of a key D numbers wide, C of them."""
    return tuple(bits for bits in BITS for _ in range(words(D)))


class BatchCodes(NamedTuple):
    """The codes of a layer's cached keys and what they are made with, for every row of a batch.

    `mean_BHD`, `encode_BHWDC` and `query_BHWCD` are the rows' `CodeBasis`, float32, by word of 16 channels.
    `word_BHWT` are the codes, int32. `sum_BHE` is the sum of the values of J up to the position `summed_BH`,
    int32; 0 for no sum yet. `recent_BHXGD` are the queries of the last `KEPT` tokens, in a ring by position.
    """

    mean_BHD: torch.Tensor
    encode_BHWDC: torch.Tensor
    query_BHWCD: torch.Tensor
    word_BHWT: torch.Tensor
    sum_BHE: torch.Tensor
    summed_BH: torch.Tensor
    recent_BHXGD: torch.Tensor

    @classmethod
    def empty(
        cls, rows: int, group: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, capacity: int
    ) -> "BatchCodes":
        """Allocate for `rows` requests without basis of at most `capacity` tokens, `group` query heads a KV head."""
        (_, H, _, D), E, W = key_PHND.shape, value_PHNE.shape[3], words(key_PHND.shape[3])
        zeros = torch.zeros(0, dtype=torch.float32, device=key_PHND.device).new_zeros
        return cls(
            zeros(rows, H, D), zeros(rows, H, W, D, SLOTS), zeros(rows, H, W, SLOTS, D),
            zeros(rows, H, W, capacity, dtype=torch.int32), zeros(rows, H, E),
            zeros(rows, H, dtype=torch.int32),
            zeros(rows, H, KEPT, group, D, dtype=key_PHND.dtype),
        )  # fmt: skip

    def grown(self, capacity: int) -> "BatchCodes":
        """Return room for `capacity` tokens of a request: this one, if it has that, or a copy."""
        more = capacity - self.word_BHWT.shape[3]
        return self._replace(word_BHWT=pad(self.word_BHWT, (0, more))) if more > 0 else self

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.nbytes for part in self)

    def of(self, rows: slice) -> "BatchCodes":
        """Return some rows, over the same memory."""
        return BatchCodes(*(part[rows] for part in self))

    def rewind(self, row: int, length: int) -> None:
        """Begin a row's sum of values anew where it includes positions from `length` on, which are gone."""
        self.summed_BH[row].masked_fill_(self.summed_BH[row] > length, 0)

    def learn(self, row: int, basis: CodeBasis) -> None:
        """Give a row its basis."""
        self.mean_BHD[row] = basis.mean_HD
        self.encode_BHWDC[row], self.query_BHWCD[row] = by_word(basis.encode_HDC), by_word(basis.query_HDC).mT
