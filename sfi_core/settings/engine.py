"""Settings of the engine, of the audit and of sampling. No torch: the command line imports this."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from sfi_core.errors import ConfigError
from sfi_core.settings.fields import Table, setting

WRITTEN = re.compile(r"(\d+(?:\.\d+)?) ?(%|[kmgt]i?b|)", re.IGNORECASE)
UNITS = {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
KV_DTYPES = ("auto", "float16", "bfloat16")
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
        """Parse a share in (0, 100%], as `20%`, or a size, as `2GiB`, `500MB` or plain bytes; raise `ConfigError`."""
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
        True, "Select beside the next layers on a second CUDA stream (Sec. 4.1), else in one call at a slow step's end."
    )
    graphs: bool | None = setting(None, "Replay steps as CUDA graphs, on a CPU as compiled calls; none: where it can.")
    lossless: bool = setting(False, "Full attention's own tokens: fast steps draft, slow steps verify.")
    fused: bool | None = setting(None, "Run known norms, rotations and gates as Triton kernels; none: on CUDA.")
    chained: bool = setting(
        False, "Launch each kernel while the one before it ends, on Hopper or newer; no device has timed it yet."
    )
    products: bool = setting(
        False,
        "Multiply up to 16 tokens by kernels with norm, gate and sum inside, on triton; no device has timed them.",
    )
    kv_device_budget: str | None = setting(
        None, "Keep all keys and values in host memory, and at most this much on the device: 20%, 2GiB; none: all."
    )
    kv_page: int = setting(32, "Under a device budget: tokens of a page, a multiple of 16 on a GPU.", least=1)
    kv_dtype: str = setting("auto", "On a CPU, the KV cache's numbers: the model's, or 16 bits.", choices=KV_DTYPES)
    backend: str = setting("auto", "What computes attention; auto takes triton on a CUDA device.", choices=BACKENDS)
    prefill_chunk: int = setting(4096, "Prompt tokens of one forward pass; 0 for all at once.", least=0)

    def __post_init__(self) -> None:
        """Check the values and the device budget; raises `ConfigError`."""
        Table.__post_init__(self)
        if self.products and self.fused is False:
            raise ConfigError("engine.products must be false without engine.fused, got true")
        if self.kv_device_budget is not None:
            DeviceBudget.parse(self.kv_device_budget)


DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Table):
    """Which steps and layers to compare with dense attention, and on how many positions."""

    every: int = setting(1, "Compare every N-th step with dense attention. Slow steps are always audited.", above=0)
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
