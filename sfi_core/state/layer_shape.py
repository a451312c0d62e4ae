"""The shape of a layer's keys and values."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer's keys and values; `window` is None for full attention, `query_heads` 0 if not needed.

    `state_bytes` are those of a request's states that do not grow: of linear attention, of a convolution. A layer
    of states alone has a window of 0 tokens. `owner` is the layer whose keys and values this one reads; None if it
    has its own.
    """

    heads: int
    key_width: int
    value_width: int
    itemsize: int
    window: int | None = None
    query_heads: int = field(default=0, compare=False)
    state_bytes: int = 0
    owner: int | None = None

    @property
    def hosted(self) -> bool:
        """Whether the host keeps something of its own for the layer: a window or states."""
        return self.window is not None or self.state_bytes > 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of one token's keys and values in memory: none where another layer has them."""
        return 0 if self.owner is not None else self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values of all heads."""
        return self.heads * (self.key_width + self.value_width) * self.itemsize
