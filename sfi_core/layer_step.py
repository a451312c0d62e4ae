"""One layer of one forward pass: dense or fast attention, then the refresh of the selected memory.

The reference backend takes a request at a time, so that a request in a batch computes what it computes alone.
"""

from functools import partial
from typing import Any

import torch

from sfi_core.observer import SelectionEvent
from sfi_core.policies.base import LayerContext, Selection
from sfi_core.run import Run
from sfi_core.sparse_state import allowed_positions
from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.sparse_attention import sparse_attention


class LayerStep:
    """The layer's attention for the run's current forward pass.

    Attributes:
        run: The run; its cache holds the layer's new keys and values already.
        layer: Index of the transformer layer.
        scale: Factor on the logits.
        soft_cap: Soft cap of the logits; None for none.
        sink_HG: Learned sink logits; None for none.
    """

    def __init__(
        self,
        run: Run,
        layer: int,
        *,
        scale: float,
        soft_cap: float | None = None,
        sink_HG: torch.Tensor | None = None,
    ) -> None:
        assert run.forward is not None, "a forward pass has begun"
        self.run, self.layer, self.forward = run, layer, run.forward
        self.pages = run.cache.layers[layer]
        self.logit_options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
        self.options: dict[str, Any] = {**self.logit_options, "sink_HG": sink_HG}

    def attend(self, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """Attend with the pass's queries.

        Args:
            query_BHGTD: Queries grouped by KV head; a request's own are the last `count` of T.

        Returns:
            out, [B, H, G, T, E]; zeros where a request has no token.
        """
        B, H, G, T, _ = query_BHGTD.shape
        out = query_BHGTD.new_zeros(B, H, G, T, self.pages.value_PHNE.shape[3])
        for row, count in enumerate(self.forward.count):
            if count:
                query = query_BHGTD[row : row + 1, :, :, T - count :]
                step = self._decode if self.forward.decode else self._prefill
                out[row : row + 1, :, :, T - count :] = step(row, query)
        if not self.forward.decode and not self.forward.final:
            self._keep_tail(query_BHGTD)
        return out

    def _decode(self, row: int, query: torch.Tensor) -> torch.Tensor:
        policy, state = self.run.policy, self.run.requests[row]
        left_dense = self.layer in policy.config.dense_layers
        if state.slow or left_dense:
            out = self._dense(row, query)
            if policy.selects_after and not left_dense:
                self._refresh(row, query)
            return out
        if policy.selects_before:
            with self.run.observer.span("select_before", self.layer):
                self._apply(row, policy.select_before(self._context(row, query)))
        return self._fast(row, query)

    def _prefill(self, row: int, query: torch.Tensor) -> torch.Tensor:
        out = self._dense(row, query)
        if self.forward.final and self.layer not in self.run.policy.config.dense_layers:
            tail = (
                [self.run.tails[self.layer][row : row + 1]] if self.layer in self.run.tails else []
            )
            self.select_first(row, torch.cat([*tail, query], 3))
        return out

    def select_first(self, row: int, query_BHGWD: torch.Tensor) -> None:
        """Make the first selection from the prompt's last queries, the last `window_prefill` of W."""
        if self.run.policy.selects_after:
            window = min(self.run.policy.config.window_prefill, self.run.requests[row].length)
            self._refresh(row, query_BHGWD[:, :, :, -window:])
        else:
            self._apply(row, self._nothing(query_BHGWD))

    def _dense(self, row: int, query: torch.Tensor) -> torch.Tensor:
        self.run.paths[
            "torch.dense_attention" if self.forward.decode else "torch.prefill_attention"
        ] += 1
        with self.run.observer.span("attention.dense", self.layer):
            return dense_attention.reference(
                query,
                self.pages.key_PHND,
                self.pages.value_PHNE,
                self._table(row),
                self.run.length_B[row : row + 1],
                **self.options,
            )

    def _fast(self, row: int, query: torch.Tensor) -> torch.Tensor:
        segment, one = self.run.segments[self.layer], slice(row, row + 1)
        self.run.paths["torch.sparse_attention"] += 1
        with self.run.observer.span("attention.fast", self.layer):
            out = sparse_attention.reference(
                query[:, :, :, 0],
                segment.key_BHSD[one],
                segment.value_BHSE[one],
                segment.length_BH[one],
                self.pages.key_PHND,
                self.pages.value_PHNE,
                self._table(row),
                self.run.recent_start_B[one],
                self.run.length_B[one],
                **self.options,
            )
        return out[:, :, :, None]

    def _refresh(self, row: int, window_query: torch.Tensor) -> None:
        state = self.run.requests[row]
        if state.recent_start == state.sink(self.run.policy.config.sink):  # J is empty
            self._apply(row, self._nothing(window_query))
            return
        with self.run.observer.span("selector", self.layer):
            selection = self.run.policy.select_after(self._context(row, window_query))
        self.run.paths["torch.selector"] += 1
        self._apply(row, selection)

    @staticmethod
    def _nothing(query: torch.Tensor) -> Selection:
        return Selection(query.new_empty(1, query.shape[1], 0, dtype=torch.int32))

    def _context(self, row: int, window_query: torch.Tensor) -> LayerContext:
        state = self.run.requests[row]
        sink = state.sink(self.run.policy.config.sink)
        return LayerContext(
            layer=self.layer,
            request=row,
            allowed_BT=allowed_positions(state.length, sink, state.recent_start).to(
                window_query.device
            ),
            key_norm_BHT=self.run.cache.norms(self.layer, row, state.length),
            logits=partial(
                window_logits.reference,
                window_query,
                self.pages.key_PHND,
                self._table(row),
                self.run.length_B[row : row + 1],
                **self.logit_options,
            ),
        )

    def _apply(self, row: int, selection: Selection | None) -> None:
        if selection is None:
            return
        run, state = self.run, self.run.requests[row]
        sink = state.sink(run.policy.config.sink)
        with run.observer.span("pack", self.layer):
            table = run.cache.block_table_BP
            run.segment(self.layer).repack(row, sink, selection.index_BHK, self.pages, table)
        # Top-K pads only where fewer than K positions are allowed, so the count needs no look at the device
        state.packed_tokens = sink + min(selection.index_BHK.shape[2], state.recent_start - sink)
        run.paths["torch.pack"] += 1
        run.observer.on_selection(
            SelectionEvent(
                request=row,
                step=state.step,
                layer=self.layer,
                index_HK=selection.index_BHK[0],
                diagnostics=selection.diagnostics,
            )
        )

    def _keep_tail(self, query_BHGTD: torch.Tensor) -> None:
        if self.run.policy.selects_after:
            old = [self.run.tails[self.layer]] if self.layer in self.run.tails else []
            window = self.run.policy.config.window_prefill
            self.run.tails[self.layer] = torch.cat([*old, query_BHGTD], 3)[
                :, :, :, -window:
            ].clone()

    def _table(self, row: int) -> torch.Tensor:
        return self.run.cache.block_table_BP[row : row + 1]
