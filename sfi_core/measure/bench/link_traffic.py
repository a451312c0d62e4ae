"""The bytes of a mean decoding step whose cache has two tiers: read on the device, and over the link.

The rules are the papers'; what a paper does not publish is a stated assumption (`Assumptions`). Bytes are
those of one request, with its share of the weights. Layers left dense and sliding windows stay on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sfi_core.measure.bench.link import Assumptions, Traffic
from sfi_core.models.byte_model import ByteModel
from sfi_core.state.layer_shape import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The tokens of a step.

    Attributes:
        context: Cached tokens.
        kept: Sink and recent tokens.
        selected: Selected tokens for each KV head.
    """

    context: int
    kept: int
    selected: int

    @property
    def attended(self) -> int:
        """Tokens that a sparse step reads for each KV head: S + K + W, or all there are."""
        return min(self.context, self.kept + self.selected)

    @property
    def recalled(self) -> int:
        """Rows that a recall of the whole selection moves: none where all tokens are kept."""
        return max(0, min(self.selected, self.context - self.kept))


def freekv(model: ByteModel, rows: Rows, page: int, assumed: Assumptions) -> Traffic:
    """Say what FreeKV moves: speculative retrieval with correction (FreeKV, Secs. 3.2 and 3.3).

    A step reads S + K + W rows, and the two vectors of each page's summary, a row's worth, to select. It
    recalls turnover x K rows of each head beside the step that reads the last recall; only the corrected
    heads' share is waited for. Paper gap: pages are cut where the budget ends, and summaries have the width
    and type of rows; the torch code's are float32.

    Args:
        model: The bytes of a token; the first layer is among those left dense (Sec. 5.1).
        rows: The tokens of the step.
        page: Tokens of a page, the paper's p = 32.
        assumed: Turnover and corrected share.
    """
    link = assumed.turnover * rows.recalled * model.row_bytes
    return Traffic(
        device_bytes=_with_summaries(model, rows, page),
        link_bytes=link,
        critical_bytes=assumed.corrected * link,
    )


def quest(model: ByteModel, rows: Rows, page: int, assumed: Assumptions) -> Traffic:
    """Say what Quest would move with its cache in host memory: as FreeKV, but it waits for every recall.

    Quest selects with a step's own query before the step attends (Tang et al., 2024, Sec. 3.3). The paper's
    cache lies on the device; the recall is ours, as FreeKV's Fig. 2a draws retrieval without speculation.

    Args:
        model: The bytes of a token.
        rows: The tokens of the step.
        page: Tokens of a page, the paper's 16.
        assumed: Turnover.
    """
    link = assumed.turnover * rows.recalled * model.row_bytes
    return Traffic(
        device_bytes=_with_summaries(model, rows, page), link_bytes=link, critical_bytes=link
    )


def synckv(
    model: ByteModel,
    rows: Rows,
    assumed: Assumptions,
    *,
    representatives: float,
    stride: int,
    static: float,
    sparse_suspension: bool,
) -> Traffic:
    """Say what SyncKV moves, the mean of a cycle of m steps (SyncKV, Secs. 4.3 to 4.5, Algorithm 1).

    Representatives read every token, whose rows stay on the device (Sec. 4.2); the other heads read
    S + K + W. Once a cycle the other heads recall turnover x (1 - rho) K rows. The recall moves beside the m
    steps of the cycle (Sec. 4.5), so no step waits unless the m steps are shorter.

    Args:
        model: The bytes of a token.
        rows: The tokens of a step.
        assumed: Turnover, of the dynamic rows from one anticipation to the next.
        representatives: Share of `model.row_bytes` that representatives have; see `share_of_heads`.
        stride: Steps of a cycle, the paper's m.
        static: The paper's rho.
        sparse_suspension: Whether representatives read S + K + W between two anticipations. Paper gap:
            Algorithm 1, line 22, reads everything at every step.
    """
    other = 1 - representatives
    dense_share = 1 / stride if sparse_suspension else 1.0
    read = dense_share * rows.context + (1 - dense_share) * rows.attended
    attended = representatives * read + other * rows.attended
    recalled = assumed.turnover * (1 - static) * rows.recalled
    return Traffic(
        device_bytes=float(model.fast(rows.context, attended)),
        link_bytes=recalled * other * model.row_bytes / stride,
    )


def sfi(model: ByteModel, rows: Rows, fast: float, slow: float, slow_rate: float) -> Traffic:
    """Say what SFI moves: a slow step streams the whole host cache and recalls its selection (Sec. 3).

    Paper gap: SFI has one tier. Every slow step moves all rows, and the K rows that it selects a second time
    into the packed segment; it waits for both. A fast step moves nothing.

    Args:
        model: The bytes of a token.
        rows: The tokens of a step.
        fast: Bytes that a fast step reads on the device.
        slow: Bytes that a slow step reads on the device.
        slow_rate: Share of slow steps.
    """
    link = slow_rate * (rows.context + rows.recalled) * model.row_bytes
    return Traffic(
        device_bytes=(1 - slow_rate) * fast + slow_rate * slow, link_bytes=link, critical_bytes=link
    )


def streamed(model: ByteModel, rows: Rows) -> Traffic:
    """Say what full attention moves when the cache is in host memory: all rows, at every step."""
    link = float(rows.context * model.row_bytes)
    return Traffic(
        device_bytes=float(model.dense(rows.context)), link_bytes=link, critical_bytes=link
    )


def resident(model: ByteModel, rows: Rows) -> Traffic:
    """Say what a policy reads that recalls nothing after the prompt: SnapKV, StreamingLLM."""
    return Traffic(device_bytes=float(model.fast(rows.context, rows.attended)))


def share_of_heads(layers: Sequence[LayerShape], heads: int) -> float:
    """Return the share of the layers' row bytes that `heads` KV heads of each layer have; at most 1."""
    total = sum(layer.row_bytes for layer in layers)
    kept = sum(layer.row_bytes * min(heads, layer.heads) // layer.heads for layer in layers)
    return kept / total if total else 0.0


def _with_summaries(model: ByteModel, rows: Rows, page: int) -> float:
    return float(model.fast(rows.context, rows.attended + rows.context / page))
