"""The tokens of a batch so far, for processors such as the repetition penalty."""

from collections.abc import Sequence

import torch

from sfi_kernels.step_descriptor import sent

LEAST_ROOM = 256  # tokens
MISSING = -1


class TokensSoFar:
    """Token ids of every row, in a buffer that doubles when it is full.

    Shorter rows repeat their first token at the end; `length_B` counts each row's own, the left padding of
    its prompt included.
    """

    def __init__(self, ids_BT: torch.Tensor) -> None:
        """Start with padded prompts."""
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
        """Return the tokens of rows, each followed by its own tail: [X, T], a view if possible.

        Shorter ones repeat their row's first token at the end.
        """
        if list(row_X) == list(range(row_X[0], row_X[0] + len(row_X))):
            ids_XT = self.ids_BT[row_X[0] : row_X[0] + len(row_X)]
        else:
            ids_XT = self.ids_BT[sent(torch.tensor(row_X), self._room_BT.device)]
        longest = max(map(len, tail))
        if not longest:
            return ids_XT
        padded = [[*one, *[MISSING] * (longest - len(one))] for one in tail]
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
