"""The least bytes that an op moves: every input read once, every output written once.

Work lists, lengths, block tables and the log-sum-exp (which a slow step passes to the Selector) are left out.
"""

from sfi_core.measure.kernel_bench.settings import PACKED_OPS, PIECES, VERIFIED, KernelSettings
from sfi_kernels.key_codes import SLOTS, words

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
    positions = settings.batch * settings.kv_heads * gathered * INT32
    more = (settings.context - tokens) * _row_bytes(settings) * dense // settings.kv_heads
    return tokens * _row_bytes(settings) + ends + logits + positions + more


def selector_bytes(settings: KernelSettings) -> int:
    """Return the bytes of the Selector's scores from one query per head."""
    positions = settings.batch * settings.context
    return positions * (settings.heads + 2 * settings.kv_heads) * FLOAT32 + positions


def top_k_bytes(settings: KernelSettings, budget: int) -> int:
    """Return the bytes of Top-K."""
    rows = settings.batch * settings.kv_heads
    return rows * (settings.context * FLOAT32 + budget * INT32)


def pack_bytes(settings: KernelSettings, rows: int) -> int:
    """Return the bytes of packing `rows` rows of every request, including sinks."""
    positions = settings.batch * settings.kv_heads * rows
    return 2 * rows * _row_bytes(settings) + positions * INT32


def recall_bytes(settings: KernelSettings, rows: int, reused: int) -> int:
    """Return the bytes of recalling `rows` rows, including sinks; `reused` of them are on the device."""
    positions = settings.batch * settings.kv_heads * (rows - settings.sink + reused)
    return pack_bytes(settings, rows) + positions * INT32


def append_bytes(settings: KernelSettings) -> int:
    """Return the bytes of appending one token to every request."""
    return 2 * _row_bytes(settings) + settings.batch * settings.kv_heads * FLOAT32


def codescan_bytes(settings: KernelSettings, tokens: int) -> int:
    """Return the bytes of appending, of choosing by words of code, and of attention over `tokens` tokens.

    Each request reads two bases, of keys and of queries.
    """
    code_bytes = _keys(settings) * words(settings.head_dim) * INT32 + 2 * _basis_bytes(settings)
    return append_bytes(settings) + code_bytes + attention_bytes(settings, tokens)


def prompt_bytes(settings: KernelSettings, queries: int, tokens: int) -> int:
    """Return the bytes of one request's last `queries` of `tokens` tokens."""
    numbers = 2 * queries * settings.heads * settings.head_dim
    return tokens * _row_bytes(settings) // settings.batch + numbers * settings.torch_dtype.itemsize


def prompt_flops(settings: KernelSettings, queries: int, tokens: int) -> int:
    """Return the multiplications and additions of the same queries; masked pairs do not count."""
    pairs = queries * tokens - queries * (queries - 1) // 2
    return 4 * settings.heads * settings.head_dim * pairs


def _keys(settings: KernelSettings) -> int:
    return settings.batch * settings.kv_heads * settings.context


def _basis_bytes(settings: KernelSettings) -> int:
    # a mean, and the projection of keys or queries
    heads = settings.batch * settings.kv_heads
    return heads * settings.head_dim * (SLOTS * words(settings.head_dim) + 1) * FLOAT32


def _row_bytes(settings: KernelSettings) -> int:
    # a key and a value in every request and KV head
    numbers = settings.batch * settings.kv_heads * 2 * settings.head_dim
    return numbers * settings.torch_dtype.itemsize


def forecast_bytes(settings: KernelSettings, backend: str) -> int:
    """Return the memory that the inputs and their checks need."""
    history = settings.context * _row_bytes(settings)
    total = history * (2 if backend == "triton" else 1)  # contiguous for SDPA, for Triton also in pages
    packed = [s + settings.sink for s in map(settings.budget, settings.retentions)]
    if PACKED_OPS & set(settings.ops):
        total += sum(packed) * _row_bytes(settings)
    if "recall" in settings.ops:
        # the old and the new segment, and the host's pages, which a CUDA device does not hold
        total += 2 * sum(packed) * _row_bytes(settings)
        total += history if backend == "torch" else 0
    if {"selector", "top_k"} & set(settings.ops):
        positions = settings.batch * settings.context * FLOAT32
        # the reference's temporary tensors: four of the logits' size, a dozen of the scores'
        total += positions * (5 * settings.heads + 12 * settings.kv_heads)
    if "codescan" in settings.ops:  # codes; the levels of one request three times, in 64 bits
        numbers = _keys(settings) * words(settings.head_dim)
        total += numbers * INT32 + numbers // settings.batch * SLOTS * 3 * 8
    if "prompt" in settings.ops:  # a piece's queries and outputs, and a rival's own keys and values
        piece = 3 * max(PIECES.values()) * settings.heads * settings.head_dim
        total += piece * settings.torch_dtype.itemsize + history // settings.batch
    if "verify" in settings.ops:  # queries and outputs of all passes, and one's partial results
        numbers = settings.batch * settings.heads * settings.head_dim
        total += numbers * 2 * sum(VERIFIED) * settings.torch_dtype.itemsize
        total += 2 * numbers * max(VERIFIED) * FLOAT32
    # the check of one request at a time: keys and values in twice their precision, logits and weights
    wide = 2 * settings.torch_dtype.itemsize
    request = settings.context * (3 * settings.kv_heads * settings.head_dim + 4 * settings.heads)
    return total + wide * request
