"""The shape of a layer's keys and values."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer's keys and values; `window` is None for full attention, `query_heads` 0 if not needed."""

    heads: int
    key_width: int
    value_width: int
    itemsize: int
    window: int | None = None
    query_heads: int = field(default=0, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values of all heads."""
        return self.heads * (self.key_width + self.value_width) * self.itemsize
