"""The device budget of the KV cache: a share of the full cache, or a size in bytes."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from sfi_core.errors import ConfigError

WRITTEN = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kmgt]i?b|)", re.IGNORECASE)
UNITS = {
    f"{prefix}{binary}b": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("kmgt", 1)
    for binary in ("", "i")
}


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The device memory that a KV cache may take: `share` of the full cache in (0, 1], or `size` bytes."""

    share: Fraction | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a share such as `20%`, or a size such as `2GiB`, `500MB` or plain bytes.

        Units are KiB, MiB, GiB, TiB (powers of 1024) and kB, MB, GB, TB (powers of 1000), in any case.

        Raise `ConfigError` if the text is neither, the share not in (0, 100%], or the size no whole byte.
        """
        wrong = ConfigError(f"kv_device_budget must be a share such as 20% or a size such as 2GiB, got {text!r}")
        written = WRITTEN.fullmatch(text.strip())
        if written is None:
            raise wrong
        number, unit = Fraction(written[1]), written[2].lower()
        if unit == "%":
            if not 0 < number <= 100:  # noqa: PLR2004 - percent
                raise wrong
            return cls(share=number / 100)
        size = number * UNITS.get(unit, 1)
        if size < 1 or (not unit and size.denominator > 1):
            raise wrong
        return cls(size=int(size))

    def bytes_of(self, cache_bytes: int) -> int:
        """Return the budget in bytes, rounded down, for a full cache of `cache_bytes`."""
        if self.size is not None:
            return self.size
        assert self.share is not None, "a budget is a share or a size"
        return int(self.share * cache_bytes)
