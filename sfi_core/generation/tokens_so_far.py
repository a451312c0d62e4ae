"""The tokens of a batch so far, for what looks back at them."""

import torch

LEAST_ROOM = 256  # tokens


class TokensSoFar:
    """Token ids of every row, whose room doubles when it is full: a step writes a column and copies nothing.

    A row that has fewer tokens than another repeats its first one before them, as `left_pad` does.
    """

    def __init__(self, ids_BT: torch.Tensor) -> None:
        """Start with padded prompts."""
        self._length = ids_BT.shape[1]
        self._room_BT = _with_room(ids_BT)

    @property
    def ids_BT(self) -> torch.Tensor:
        """The ids; a view that the next call of `add` leaves as it is."""
        return self._room_BT[:, : self._length]

    def add(self, token_B: torch.Tensor) -> None:
        """Write a token for each row."""
        if self._length == self._room_BT.shape[1]:
            self._room_BT = _with_room(self._room_BT)
        self._room_BT[:, self._length] = token_B
        self._length += 1

    def seat(self, row: int, other: "TokensSoFar", width: int) -> None:
        """Give a row the tokens of another batch of one, and keep the last `width` of all rows."""
        ids_BT = _last(self.ids_BT, width)
        self._room_BT, self._length = _with_room(ids_BT), width
        self._room_BT[row, :width] = _last(other.ids_BT, width)[0]


def _with_room(ids_BT: torch.Tensor) -> torch.Tensor:
    B, T = ids_BT.shape
    room_BT = ids_BT.new_empty(B, max(2 * T, LEAST_ROOM))
    room_BT[:, :T] = ids_BT
    return room_BT


def _last(ids_BT: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - ids_BT.shape[1]
    if missing <= 0:
        return ids_BT[:, -missing:]
    return torch.cat([ids_BT[:, :1].expand(-1, missing), ids_BT], 1)
