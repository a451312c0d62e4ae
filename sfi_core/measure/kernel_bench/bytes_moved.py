"""The least bytes that an op moves: every input read once, every output written once.

Work lists, lengths, block tables and the log-sum-exp (which a slow step passes to the Selector) are left out.
"""

from sfi_core.measure.kernel_bench.settings import PACKED_OPS, PIECES, VERIFIED, KernelSettings
from sfi_kernels.code_scan import SLOTS, words

INT32 = FLOAT32 = 4


def attention_bytes(
    settings: KernelSettings,
    tokens: int,
    *,
    evidence: bool = False,
    gathered: int = 0,
    queries: int = 1,
    dense: int = 0,
) -> int:
    """Return the bytes of attention over `tokens` tokens of every request, over all in `dense` KV heads.

    `evidence` counts the logits of one query, `gathered` the positions of rows that are read in place.
    """
    rows = settings.batch * settings.heads
    ends = 2 * rows * queries * settings.head_dim * settings.torch_dtype.itemsize
    logits = rows * settings.context * FLOAT32 if evidence else 0
    more = (settings.context - tokens) * _row_bytes(settings) * dense // settings.kv_heads
    return tokens * _row_bytes(settings) + ends + logits + _pairs(settings) * gathered * INT32 + more


def selector_bytes(settings: KernelSettings) -> int:
    """Return the bytes of the Selector's scores from one query per head."""
    positions = settings.batch * settings.context
    return positions * (settings.heads + 2 * settings.kv_heads) * FLOAT32 + positions


def top_k_bytes(settings: KernelSettings, budget: int) -> int:
    """Return the bytes of Top-K."""
    return _pairs(settings) * (settings.context * FLOAT32 + budget * INT32)


def pack_bytes(settings: KernelSettings, rows: int) -> int:
    """Return the bytes of packing `rows` rows of every request, including sinks."""
    return 2 * rows * _row_bytes(settings) + _pairs(settings) * rows * INT32


def recall_bytes(settings: KernelSettings, rows: int, reused: int) -> int:
    """Return the bytes of recalling `rows` rows, including sinks; `reused` of them are on the device."""
    return pack_bytes(settings, rows) + _pairs(settings) * (rows - settings.sink + reused) * INT32


def append_bytes(settings: KernelSettings) -> int:
    """Return the bytes of appending one token to every request."""
    return 2 * _row_bytes(settings) + _pairs(settings) * FLOAT32


def codescan_bytes(settings: KernelSettings, tokens: int) -> int:
    """Return the bytes of appending, of choosing by words of code, and of attention over `tokens` tokens.

    Each request reads two bases, of keys and of queries: a mean, and the projection of keys or queries.
    """
    numbers = words(settings.head_dim)
    basis = settings.head_dim * (SLOTS * numbers + 1) * FLOAT32
    codes = _pairs(settings) * (settings.context * numbers * INT32 + 2 * basis)
    return append_bytes(settings) + codes + attention_bytes(settings, tokens)


def prompt_bytes(settings: KernelSettings, queries: int, tokens: int) -> int:
    """Return the bytes of one request's last `queries` of `tokens` tokens."""
    numbers = 2 * queries * settings.heads * settings.head_dim
    return tokens * _row_bytes(settings) // settings.batch + numbers * settings.torch_dtype.itemsize


def prompt_flops(settings: KernelSettings, queries: int, tokens: int) -> int:
    """Return the multiplications and additions of the same queries; masked pairs do not count."""
    pairs = queries * tokens - queries * (queries - 1) // 2
    return 4 * settings.heads * settings.head_dim * pairs


def _pairs(settings: KernelSettings) -> int:
    # of a request and a KV head
    return settings.batch * settings.kv_heads


def _row_bytes(settings: KernelSettings) -> int:
    # a key and a value in every request and KV head
    return _pairs(settings) * 2 * settings.head_dim * settings.torch_dtype.itemsize


def forecast_bytes(settings: KernelSettings, backend: str) -> int:
    """Return the memory that the inputs and their checks need."""
    ops, item = set(settings.ops), settings.torch_dtype.itemsize
    history = settings.context * _row_bytes(settings)
    total = history * (2 if backend == "triton" else 1)  # contiguous for SDPA, for Triton also in pages
    packed = sum(settings.budget(r) + settings.sink for r in settings.retentions) * _row_bytes(settings)
    if PACKED_OPS & ops:
        total += packed
    if "pack" in ops:
        total += packed
    if "recall" in ops:  # the old and the new segment, and the host's pages, which a CUDA device does not hold
        total += 2 * packed + (history if backend == "torch" else 0)
    if {"selector", "top_k"} & ops:
        # the reference's temporary tensors: four of the logits' size, a dozen of the scores'
        total += settings.batch * settings.context * FLOAT32 * (5 * settings.heads + 12 * settings.kv_heads)
    if "codescan" in ops:  # codes; the levels of one request three times, in 64 bits
        numbers = _pairs(settings) * settings.context * words(settings.head_dim)
        total += numbers * INT32 + numbers // settings.batch * SLOTS * 3 * 8
    if "prompt" in ops:  # a piece's queries and outputs, and a rival's own keys and values
        total += 3 * max(PIECES.values()) * settings.heads * settings.head_dim * item + history // settings.batch
    if "verify" in ops:  # queries and outputs of all passes, and one's partial results
        numbers = 2 * settings.batch * settings.heads * settings.head_dim
        total += numbers * (sum(VERIFIED) * item + max(VERIFIED) * FLOAT32)
    # the check of one request at a time: keys and values in twice their precision, logits and weights
    request = settings.context * (3 * settings.kv_heads * settings.head_dim + 4 * settings.heads)
    return total + 2 * item * request
