"""The settings of the kernel benchmark: ops and shape, and the least bytes that an op moves.

Every input is read once, every output written once; work lists, lengths, block tables and the log-sum-exp (which a
slow step passes to the Selector) are left out.
"""

from dataclasses import dataclass

import torch

from sfi_core.errors import BackendError, ConfigError, unknown
from sfi_core.settings.engine import BACKENDS
from sfi_kernels.code_scan import SLOTS, words

OPS = (
    "fast", "dense", "verify", "mixed_heads", "selector", "top_k", "pack", "recall", "append",
    "codescan", "prompt", "rms_norm", "rotary", "silu_mul",
)  # fmt: skip
PACKED_OPS = {"fast", "mixed_heads", "pack", "recall", "codescan"}  # work on the packed rows of a retention
VERIFIED = (1, 5, 8, 9, 17)  # queries of a verification: one more than its draft has tokens
SWEEPS = ("retention",)
DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# the paper's Table 1: retention, speed-up over its dense attention at 16K tokens, batch 16, bf16, B200
TABLE_1 = {
    0.016: 10.67, 0.063: 9.56, 0.125: 7.15, 0.25: 3.96, 0.375: 2.75, 0.5: 2.10, 0.75: 1.43, 0.984: 1.10, 1.0: 1.00,
}  # fmt: skip
REPEATS = {"cpu": 5, "cuda": 100}
INT32 = FLOAT32 = 4
CPU_SHAPE: dict[str, object] = {"context": 4096, "batch": 1}  # in place of the defaults, which take minutes there
PIECES = {"cpu": 256, "cuda": 2048}  # queries of a prompt's piece, by device


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """One run of the benchmark; the default shape is a layer of Qwen3-4B under the paper's Table 1."""

    ops: tuple[str, ...] = OPS
    retentions: tuple[float, ...] = (0.125,)  # shares of the context that the fast step reads, each in (0, 1]
    sweep: bool = False  # whether the retentions are those of Table 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 16384  # cached tokens of a request
    batch: int = 16
    dtype: str = "auto"  # a name in `DTYPES`
    sink: int = 4
    recent: int = 256  # tokens of the recent segment
    repeats: int | None = None  # timed calls of each variant; None for `REPEATS`
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that cannot be measured."""
        for op in self.ops:
            if op not in OPS:
                raise unknown("op", op, OPS)
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        for name in ("heads", "kv_heads", "head_dim", "context", "batch", "repeats"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        self._check_lengths()

    def _check_lengths(self) -> None:
        parts = f"({self.sink} sink, {self.recent} recent and 1 selected token), got"
        least = self.sink + self.recent + 1
        if self.context < least:
            raise ConfigError(f"context must be at least {least} {parts} {self.context}")
        for retention in self.retentions:
            if not 0 < retention <= 1:
                raise ConfigError(f"retention must be in (0, 1], got {retention}")
            if self.attended(retention) < least:
                share = f"{least / self.context:.4g} at a context of {self.context}"
                raise ConfigError(f"retention must be at least {share} {parts} {retention}")

    @classmethod
    def for_sweep(cls, sweep: str, ops: tuple[str, ...] | None, **shape: object) -> "KernelSettings":
        """Make the settings of a sweep over the retentions of Table 1 that the context allows."""
        if sweep not in SWEEPS:
            raise unknown("sweep", sweep, SWEEPS)
        whole = cls(**{**shape, "retentions": (1.0,)})  # type: ignore[arg-type]
        reachable = tuple(share for share in TABLE_1 if whole.budget(share) > 0)
        chosen = {"ops": ops or ("fast", "dense"), "retentions": reachable, "sweep": True}
        return cls(**{**shape, **chosen})  # type: ignore[arg-type]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of queries, keys and values."""
        return DTYPES[self.dtype]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return float(self.head_dim**-0.5)

    def attended(self, retention: float) -> int:
        """Return the tokens that the fast step reads."""
        return round(retention * self.context)

    def budget(self, retention: float) -> int:
        """Return the selected tokens per KV head (K)."""
        return self.attended(retention) - self.sink - self.recent

    def piece(self, device: torch.device, *, last: bool = False) -> int:
        """Return the queries of a prompt's first piece, or of the last piece, which follows a cache."""
        return min(PIECES[device.type], self.context // 2 if last else self.context)

    def shown(self) -> dict[str, object]:
        """Return the shape's columns of every row."""
        dtype = str(self.torch_dtype).removeprefix("torch.")
        sizes = {name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim")}
        return {"context": self.context, "batch": self.batch, "dtype": dtype, **sizes}

    def attention_bytes(
        self, tokens: int, *, evidence: bool = False, gathered: int = 0, queries: int = 1, dense: int = 0
    ) -> int:
        """Return the bytes of attention over `tokens` tokens of every request, over all in `dense` KV heads.

        `evidence` counts the logits of one query, `gathered` the positions of rows that are read in place.
        """
        rows = self.batch * self.heads
        ends = 2 * rows * queries * self.head_dim * self.torch_dtype.itemsize
        logits = rows * self.context * FLOAT32 if evidence else 0
        more = (self.context - tokens) * self._row_bytes * dense // self.kv_heads
        return tokens * self._row_bytes + ends + logits + self._pairs * gathered * INT32 + more

    def selector_bytes(self) -> int:
        """Return the bytes of the Selector's scores from one query per head."""
        positions = self.batch * self.context
        return positions * (self.heads + 2 * self.kv_heads) * FLOAT32 + positions

    def top_k_bytes(self, budget: int) -> int:
        """Return the bytes of Top-K."""
        return self._pairs * (self.context * FLOAT32 + budget * INT32)

    def pack_bytes(self, rows: int) -> int:
        """Return the bytes of packing `rows` rows of every request, including sinks."""
        return 2 * rows * self._row_bytes + self._pairs * rows * INT32

    def recall_bytes(self, rows: int, reused: int) -> int:
        """Return the bytes of recalling `rows` rows, including sinks; `reused` of them are on the device."""
        return self.pack_bytes(rows) + self._pairs * (rows - self.sink + reused) * INT32

    def append_bytes(self) -> int:
        """Return the bytes of appending one token to every request."""
        return 2 * self._row_bytes + self._pairs * FLOAT32

    def codescan_bytes(self, tokens: int) -> int:
        """Return the bytes of appending, of choosing by words of code, and of attention over `tokens` tokens.

        Each request reads two bases, of keys and of queries: a mean, and the projection of keys or queries.
        """
        numbers = words(self.head_dim)
        basis = self.head_dim * (SLOTS * numbers + 1) * FLOAT32
        codes = self._pairs * (self.context * numbers * INT32 + 2 * basis)
        return self.append_bytes() + codes + self.attention_bytes(tokens)

    def prompt_bytes(self, queries: int, tokens: int) -> int:
        """Return the bytes of one request's last `queries` of `tokens` tokens."""
        numbers = 2 * queries * self.heads * self.head_dim
        return tokens * self._row_bytes // self.batch + numbers * self.torch_dtype.itemsize

    def prompt_flops(self, queries: int, tokens: int) -> int:
        """Return the multiplications and additions of the same queries; masked pairs do not count."""
        pairs = queries * tokens - queries * (queries - 1) // 2
        return 4 * self.heads * self.head_dim * pairs

    @property
    def _pairs(self) -> int:
        # of a request and a KV head
        return self.batch * self.kv_heads

    @property
    def _row_bytes(self) -> int:
        # a key and a value in every request and KV head
        return self._pairs * 2 * self.head_dim * self.torch_dtype.itemsize

    def forecast_bytes(self) -> int:
        """Return about the memory that the inputs and their checks need, at most."""
        history, request = self.context * self._row_bytes, self.context * self.heads * self.head_dim
        packed = sum(self.budget(retention) + self.sink for retention in self.retentions) * self._row_bytes
        # contiguous, in pages, and what a recall keeps on the host; segments of fast steps, packs and recalls
        total = 3 * history + 4 * packed
        if {"selector", "top_k"} & set(self.ops):
            # the reference's temporary tensors: four of the logits' size, a dozen of the scores'
            total += self.batch * self.context * FLOAT32 * (5 * self.heads + 12 * self.kv_heads)
        # the check of one request at a time in float64, and of a prompt's and verifications' queries
        return total + 8 * request + 64 * max(PIECES.values()) * self.heads * self.head_dim


def resolve_backend(name: str, device: torch.device) -> str:
    """Pick the backend: Triton on CUDA, PyTorch elsewhere; raise `BackendError` for Triton elsewhere."""
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name == "triton" and device.type != "cuda":
        raise BackendError(
            f"backend triton must have a CUDA device to be timed, got {device.type}; time the PyTorch "
            "code with --backend torch, or check the kernels without a GPU with --compile-only"
        )
    return name
