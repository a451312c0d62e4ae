"""Picks the next tokens from scores: the best one, or a sample by the noise of the token's index.

Noise is a function of seed, request, token index and token id, without a state. The first three are hashed to a key.
Token id v takes output v of the generator SplitMix64 seeded with the key (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", 2014). The integers are the same on every device; logarithms may differ in the last bit
of a float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import NumericsError
from sfi_core.machine.threads import one_thread
from sfi_kernels.step_descriptor import sent

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


LEAST_ROOM = 256  # tokens
MISSING = -1


class TokensSoFar:
    """Token ids of every row, in a buffer that doubles when it is full.

    Shorter rows repeat their first token at the end; `length_B` counts the others, left padding of a prompt included.
    """

    def __init__(self, ids_BT: torch.Tensor) -> None:
        B, T = ids_BT.shape
        self.length_B = [T] * B
        self._room_BT = _with_room(ids_BT, T)

    @property
    def ids_BT(self) -> torch.Tensor:
        """The ids; a view that the next `add` does not change."""
        return self._room_BT[:, : max(self.length_B)]

    def add(self, tokens: Sequence[Sequence[int]]) -> None:
        """Write each row's new tokens, any number of them."""
        written = [
            (row, self.length_B[row] + place, token)
            for row, new in enumerate(tokens)
            for place, token in enumerate(new)
        ]
        if not written:
            return
        self.length_B = [length + len(new) for length, new in zip(self.length_B, tokens, strict=True)]
        self._make_room()
        place_3N = torch.tensor(list(zip(*written, strict=True)))
        row_N, place_N, token_N = sent(place_3N, self._room_BT.device)
        self._room_BT[row_N, place_N] = token_N

    def before(self, row_X: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the tokens of rows, each followed by its own tail, padded likewise: [X, T], a view if possible."""
        first, stop = row_X[0], row_X[0] + len(row_X)
        if list(row_X) == list(range(first, stop)):
            ids_XT = self.ids_BT[first:stop]
        else:
            ids_XT = self.ids_BT[sent(torch.tensor(row_X), self._room_BT.device)]
        longest = max(map(len, tail))
        if not longest:
            return ids_XT
        padded = [[*tokens, *[MISSING] * (longest - len(tokens))] for tokens in tail]
        tail_XT = sent(torch.tensor(padded), self._room_BT.device)
        return torch.cat([ids_XT, torch.where(tail_XT == MISSING, ids_XT[:, :1], tail_XT)], 1)

    def seat(self, row: int, other: "TokensSoFar") -> None:
        """Put the tokens of a batch of one into a row."""
        (self.length_B[row],) = other.length_B
        self._make_room()
        self._room_BT[row] = other.ids_BT[0, 0]
        self._room_BT[row, : self.length_B[row]] = other.ids_BT[0]

    def _make_room(self) -> None:
        longest = max(self.length_B)
        if longest > self._room_BT.shape[1]:
            self._room_BT = _with_room(self._room_BT, longest)


def _with_room(ids_BT: torch.Tensor, length: int) -> torch.Tensor:
    room_BT = ids_BT[:, :1].repeat(1, max(2 * length, LEAST_ROOM))
    room_BT[:, : ids_BT.shape[1]] = ids_BT
    return room_BT


# most logits, or ids, that are processed at once: fit for a CPU's caches; on other devices 32 MiB as float64
CPU_PIECE, PIECE = 2**19, 2**22
PAD = 0  # the input of a row whose request has ended or rests: read by nobody, and in every vocabulary
TOKEN, FINE = range(2)  # rows of `picked_2X`: the token, and whether its score is finite


Ahead = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class Picks:
    """Tokens that the device has picked, or will, for the rows `row_X`; they are on their way to the host.

    `index_X` are the tokens' indices among those that their requests generate; None where the score need not be finite.
    `picked_2X` is on the device, int64; `host_2X` is valid once `done` has happened.
    """

    picked_2X: torch.Tensor
    host_2X: torch.Tensor
    done: torch.cuda.Event | None
    row_X: Sequence[int]
    index_X: Sequence[int | None]

    @property
    def token_X(self) -> torch.Tensor:
        """The tokens, on the device."""
        return self.picked_2X[TOKEN]


@dataclass(slots=True)
class Row:
    """One request of a picker."""

    request: int
    noise: tuple[int, int] | None  # the seed and the request that name that of its draws; None takes the best token
    step: int = 0  # the index of its next token among those that it generates


class Picker(ABC):
    """Turns logits into tokens; `rows` has the request of each row, `tokens` their tokens if `scores` needs them.

    A sampled token has the largest sum of processed score and Gumbel noise, which does not depend on the rest of the
    batch or the tokens per pass. `ahead` is called with a step's tokens, still on the device, before the host waits.
    """

    hint = ""  # ends the message of an error about scores that are not finite
    tokens: TokensSoFar | None = None
    own_scores = True  # False: transformers' processors make them, and may make NaN on purpose
    looks_back = False  # whether `scores` reads the tokens before a position

    def __init__(
        self, requests: Sequence[int], ranks: Ranks = ALONE, *, seed: int | None, ahead: Ahead | None = None
    ) -> None:
        """Start with the first token of some requests; without a seed, take the best token."""
        self.rows = [Row(request, None if seed is None else (seed, request)) for request in requests]
        self.ahead = ahead
        self._ranks, self._seed = ranks, seed

    @abstractmethod
    def alone(self, ids_1T: torch.Tensor, request: int) -> Self:
        """Make a picker of one more request, with the same settings."""

    @abstractmethod
    def scores(self, logits_PV: torch.Tensor, row_P: Sequence[int], tail: Sequence[Sequence[int]]) -> torch.Tensor:
        """Process the float32 logits of some of `pick`'s positions."""

    def widest(self, vocabulary: int) -> int:
        """Return how many numbers `scores` holds per position."""
        return vocabulary

    def seat(self, row: int, other: Self) -> None:
        """Put a request that was sampled alone into a row."""
        (self.rows[row],) = other.rows
        if self.tokens is not None and other.tokens is not None:
            self.tokens.seat(row, other.tokens)

    def __call__(self, logits_BV: torch.Tensor, finished_B: list[bool]) -> list[int]:
        """Pick and note the next token of every request; a finished request gets `PAD`.

        Raise `NumericsError` if a running request's logits hold NaN or +inf, or nothing finite.
        """
        row_X, index_X = range(len(self.rows)), [row.step for row in self.rows]
        with one_thread(wanted=logits_BV.device.type == "cpu" and logits_BV.numel() < CPU_PIECE):
            # else OpenMP's threads spin into the next step
            picked_2B = self._choose(logits_BV, row_X, index_X, [()] * len(self.rows))
        running_B = [None if done else index for index, done in zip(index_X, finished_B, strict=True)]
        picks = _to_host(picked_2B, row_X, running_B)
        if self.ahead is not None:  # after the copy to the host, which then does not wait for its work
            self.ahead(picks.token_X)
        token_B = self.read(picks)
        pairs = list(zip(token_B, finished_B, strict=True))
        self.advance([[] if done else [token] for token, done in pairs])
        return [PAD if done else token for token, done in pairs]

    def draw(
        self, logits_XV: torch.Tensor, row_X: Sequence[int], offset_X: Sequence[int], tail: Sequence[Sequence[int]]
    ) -> Picks:
        """Pick tokens for X positions of a pass without waiting, noting them or calling `ahead`.

        They are those that steps would pick. `offset_X` is the distance from the row's next token to the position's;
        `tail` has, for each position, the tokens before it that follow the row's noted tokens, which are read only if
        the picker `looks_back`.
        """
        index_X = [self.rows[row].step + offset for row, offset in zip(row_X, offset_X, strict=True)]
        return _to_host(self._choose(logits_XV, row_X, index_X, tail), row_X, index_X)

    def read(self, picks: Picks) -> list[int]:
        """Wait for tokens and return them; raise `NumericsError` as `__call__` does."""
        if picks.done is not None:
            picks.done.synchronize()
        token_X, fine_X = picks.host_2X.tolist()
        for row, index, fine in zip(picks.row_X, picks.index_X, fine_X, strict=True):
            if index is not None and not fine:
                where = f"step {index} in request {self.rows[row].request}{self.hint}"
                raise NumericsError(f"logits must be finite, got NaN or infinity at {where}")
        return list(token_X)

    def advance(self, tokens: Sequence[Sequence[int]]) -> None:
        """Note each row's new tokens, any number of them."""
        for row, new in zip(self.rows, tokens, strict=True):
            row.step += len(new)
        if self.tokens is not None:
            self.tokens.add(tokens)

    def _choose(
        self, logits_XV: torch.Tensor, row_X: Sequence[int], index_X: Sequence[int], tail: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        # the numbers of `Picks`, [2, X] int64, the same on all ranks
        X, V = logits_XV.shape
        picked_2X = torch.empty(2, X, dtype=torch.int64, device=logits_XV.device)
        key_X = None  # if no row is drawn; a row that is not drawn gets any key
        if any(self.rows[row].noise for row in row_X):
            keys = [noise_key(*(self.rows[row].noise or (0, 0)), at) for row, at in zip(row_X, index_X, strict=True)]
            key_X = sent(torch.tensor(keys), logits_XV.device)
        room = CPU_PIECE if logits_XV.device.type == "cpu" else PIECE
        size = max(1, room // self.widest(V))
        for part in (slice(start, start + size) for start in range(0, X, size)):
            logits_PV = logits_XV[part].float()
            whole_P = None if self.own_scores else logits_PV.amax(-1).isfinite()
            scores_PV = self.scores(logits_PV, row_X[part], tail[part])
            if key_X is not None:
                noise_PV = gumbel(key_X[part], scores_PV.shape[1])
                if greedy := [place for place, row in enumerate(row_X[part]) if self.rows[row].noise is None]:
                    noise_PV.index_fill_(0, sent(torch.tensor(greedy), noise_PV.device), 0.0)
                scores_PV = noise_PV.add_(scores_PV)
            token_P = scores_PV.argmax(-1)
            picked_2X[TOKEN, part] = token_P
            # NaN counts as the largest, so that the largest score tells of NaN and infinity, also of a sampler's
            fine_P = scores_PV.gather(-1, token_P[:, None])[:, 0].isfinite() if whole_P is None else whole_P
            picked_2X[FINE, part] = fine_P
        return self._ranks.settle(picked_2X)


def _to_host(picked_2X: torch.Tensor, row_X: Sequence[int], index_X: Sequence[int | None]) -> Picks:
    # begin to copy what `Picker._choose` returns, without waiting
    host_2X, done = picked_2X, None
    if picked_2X.is_cuda:
        host_2X = torch.empty(picked_2X.shape, dtype=picked_2X.dtype, pin_memory=True)
        host_2X.copy_(picked_2X, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(picked_2X.device))
    return Picks(picked_2X, host_2X, done, row_X, index_X)
