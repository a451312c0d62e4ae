"""Settings of the engine, of the audit and of sampling. No torch: the command line imports this."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

from sfi_core.errors import ConfigError
from sfi_core.settings.fields import Table, setting

WRITTEN = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kmgt]i?b|)", re.IGNORECASE)
UNITS = {
    f"{prefix}{binary}b": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("kmgt", 1)
    for binary in ("", "i")
}
BACKENDS = ("auto", "torch", "triton")
WEIGHTS = ("auto", "floats", "int8")  # how the matrices of a model lie; see `load`
PAGE_SIZE = 64  # tokens of a page under the triton backend: one tile


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The device memory that a KV cache may take: bytes, or a share in (0, 1] of the full cache if it `is_share`."""

    amount: Fraction
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a share such as `20%`, or a size such as `2GiB`, `500MB` or plain bytes.

        Units are KiB, MiB, GiB, TiB (powers of 1024) and kB, MB, GB, TB (powers of 1000), in any case.

        Raise `ConfigError` if the text is neither, the share not in (0, 100%], or the size no whole byte.
        """
        written = WRITTEN.fullmatch(text.strip())
        if written is not None:
            number, unit = Fraction(written[1]), written[2].lower()
            if unit == "%" and 0 < number <= 100:  # noqa: PLR2004 - percent
                return cls(number / 100, is_share=True)
            size = number * UNITS.get(unit, 1)
            if unit != "%" and size >= 1 and (unit or size.denominator == 1):
                return cls(size)
        raise ConfigError(f"kv_device_budget must be a share such as 20% or a size such as 2GiB, got {text!r}")

    def bytes_of(self, cache_bytes: int) -> int:
        """Return the budget in bytes, rounded down, for a full cache of `cache_bytes`."""
        return int(self.amount * cache_bytes) if self.is_share else int(self.amount)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Table):
    """The engine's switches, and how it reads prompts and computes attention."""

    overlap: bool = setting(
        True,
        "Run a layer's Selector and pack on a second CUDA stream, beside the next layers (Sec. 4.1). Else a "
        "slow step selects for all layers in one call at its end, as a CPU always does.",
    )
    graphs: bool | None = setting(
        None,
        "Replay whole decoding steps as CUDA graphs, on a CPU each as one compiled call; none does so where it can.",
    )
    lossless: bool = setting(
        False, "Full attention's own tokens: fast steps draft, slow steps verify what they drafted."
    )
    fused: bool | None = setting(
        None,
        "Run each of a model's norms, rotations and gates as one Triton kernel. Modules whose source is not "
        "known stay as they are. None does so on a CUDA device.",
    )
    kv_device_budget: str | None = setting(
        None,
        "Keep all keys and values in host memory, and at most this much on the device: a share of the cache "
        "such as 20%, or a size such as 2GiB. None keeps everything on the device.",
    )
    kv_page: int = setting(32, "Under a device budget: tokens of a page, which goes to host memory whole.", least=1)
    kv_dtype: str = setting(
        "auto",
        "On a CPU, the numbers of the KV cache: the model's, or those of 16 bits, which halve a float32 cache.",
        choices=("auto", "float16", "bfloat16"),
    )
    backend: str = setting(
        "auto",
        "What computes attention: the Triton kernels or PyTorch. auto takes triton on a CUDA device.",
        choices=BACKENDS,
    )
    prefill_chunk: int = setting(4096, "Prompt tokens of one forward pass; 0 for all at once.", least=0)

    def __post_init__(self) -> None:
        """Check the values and the device budget; raises `ConfigError`."""
        Table.__post_init__(self)
        if self.kv_device_budget is not None:
            DeviceBudget.parse(self.kv_device_budget)

    def on_several_ranks(self) -> "EngineOptions":
        """Return the options without overlap: ranks must call each other in the order of the layers.

        Raise `ConfigError` if `graphs` is True, which tensor parallelism excludes.
        """
        if self.graphs:
            raise ConfigError("graphs must be off under tensor parallelism, got graphs=True")
        return replace(self, overlap=False)


DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Table):
    """Which steps and layers to compare with dense attention, and on how many positions."""

    every: int = setting(
        1,
        "Compare every N-th step with dense attention. The tokens stay the same. Slow steps are always "
        "audited: later steps are compared with them.",
        above=0,
    )
    top: int = setting(1024, "Positions of an audited support, K: those with the most attention.", above=0)
    layers: tuple[int, ...] | None = setting(None, "Audit only these layers; none audits all.", least=0)

    def due(self, step: int, *, slow: bool) -> bool:
        """Say whether a request's step is audited."""
        return slow or step % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Table):
    """How the next token is picked; names and meanings are those of transformers' generation config."""

    temperature: float | None = setting(
        None, "Divides logits; 0 is greedy. Without it top_k, top_p and min_p draw at 1; else it is 0.", least=0
    )
    top_k: int = setting(0, "Keep the k most likely tokens; 0 keeps all.", least=0)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability; 1 keeps all.", above=0, most=1)
    min_p: float = setting(0.0, "Keep tokens at least this share as likely as the best; 0 keeps all.", least=0, most=1)
    repetition_penalty: float = setting(1.0, "Above 1 makes repeated tokens less likely; 1 does nothing.", above=0)

    @property
    def do_sample(self) -> bool:
        """Whether a token is drawn; otherwise the most likely one is taken."""
        return self.divisor > 0

    @property
    def divisor(self) -> float:
        """The temperature in force, 0 where the most likely token is taken."""
        if self.temperature is None:
            return float(bool(self.top_k or self.top_p < 1 or self.min_p))
        return self.temperature
