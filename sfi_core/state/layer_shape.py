"""What a layer keeps of a token: heads, widths, bytes and the window."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer's keys and values: heads, widths, bytes of a number, and the window if it slides.

    `query_heads` counts the query heads of all KV heads; 0 where nobody asks for them.
    """

    heads: int
    key_width: int
    value_width: int
    itemsize: int
    window: int | None = None
    query_heads: int = field(default=0, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value over all heads."""
        return self.heads * (self.key_width + self.value_width) * self.itemsize
