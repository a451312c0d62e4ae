"""The settings of the kernel benchmark: ops and shape. No torch: the command line imports this."""

from dataclasses import dataclass

from sfi_core.errors import ConfigError, unknown

OPS = (
    "fast", "dense", "verify", "mixed_heads", "selector", "top_k", "pack", "recall", "append",
    "codescan", "prompt", "rms_norm", "rotary", "silu_mul", "project",
)  # fmt: skip
RETAINING = {"fast", "mixed_heads", "top_k", "pack", "recall", "codescan"}  # depend on the retention
SWEEPS = ("retention",)
DTYPES = ("auto", "bfloat16", "float16", "float32")
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
    dtype: str = "auto"  # one of `DTYPES`
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
            if self.attended(retention) < least and RETAINING & set(self.ops):
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
    def dtype_name(self) -> str:
        """PyTorch's name of the dtype of queries, keys and values."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of such a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return float(self.head_dim**-0.5)

    @property
    def pairs(self) -> int:
        """Pairs of a request and a KV head."""
        return self.batch * self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and a value in every request and KV head."""
        return self.pairs * 2 * self.head_dim * self.itemsize

    def attended(self, retention: float) -> int:
        """Return the tokens that the fast step reads."""
        return round(retention * self.context)

    def budget(self, retention: float) -> int:
        """Return the selected tokens per KV head (K)."""
        return self.attended(retention) - self.sink - self.recent

    def attention_bytes(
        self, tokens: int, *, evidence: bool = False, gathered: int = 0, queries: int = 1, dense: int = 0
    ) -> int:
        """Return the least bytes of attention over `tokens` tokens of every request, over all in `dense` KV heads.

        `evidence` counts a query's logits, `gathered` positions of rows read in place; lists and tables are left out.
        """
        rows = self.batch * self.heads
        ends = 2 * rows * queries * self.head_dim * self.itemsize
        logits = rows * self.context * FLOAT32 if evidence else 0
        more = (self.context - tokens) * self.row_bytes * dense // self.kv_heads
        return tokens * self.row_bytes + ends + logits + self.pairs * gathered * INT32 + more

    def append_bytes(self) -> int:
        """Return the bytes of appending one token to every request."""
        return 2 * self.row_bytes + self.pairs * FLOAT32

    def pack_bytes(self, rows: int) -> int:
        """Return the bytes of packing `rows` rows of every request, including sinks."""
        return 2 * rows * self.row_bytes + self.pairs * rows * INT32

    def forecast_bytes(self) -> int:
        """Return about the memory that the inputs and their checks need, at most."""
        history, request = self.context * self.row_bytes, self.context * self.heads * self.head_dim
        retentions = self.retentions if RETAINING & set(self.ops) else ()
        packed = sum(self.budget(retention) + self.sink for retention in retentions) * self.row_bytes
        # contiguous, in pages, and what a recall keeps on the host; segments of fast steps, packs and recalls
        total = 3 * history + 4 * packed
        if {"selector", "top_k"} & set(self.ops):
            # the reference's temporary tensors: four of the logits' size, a dozen of the scores'
            total += self.batch * self.context * FLOAT32 * (5 * self.heads + 12 * self.kv_heads)
        # the check of one request at a time in float64, and of a prompt's and verifications' queries
        return total + 8 * request + 64 * max(PIECES.values()) * self.heads * self.head_dim
