"""What a layer keeps of a token: heads, widths, bytes and the window."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer's keys and values: heads, widths, bytes of a number, and the window if it slides."""

    heads: int
    key_width: int
    value_width: int
    itemsize: int
    window: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value over all heads."""
        return self.heads * (self.key_width + self.value_width) * self.itemsize
