"""One layer of one forward pass: dense or fast attention, then the refresh of the selected memory.

`LayerStep` is the reference backend. It takes a request at a time, but for fast ones side by side, which
share their calls; each still computes what it computes alone.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch

from sfi_core.engine.policy_view import layer_context, prompt_blocks
from sfi_core.engine.run import Run
from sfi_core.observers.events import SelectionEvent
from sfi_core.policies.base import LayerContext, Selection
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.dense_attention.reference import dense_attention_with_logits
from sfi_kernels.sparse_attention import sparse_attention

R = TypeVar("R")


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
        self.backend = run.cache.backend
        self.pages = run.cache.layers[layer]
        self.left_dense = layer in run.policy.config.dense_layers
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
        for rows in self._alike():
            count = self.forward.count[rows.start]
            query = query_BHGTD[rows, :, :, T - count :]
            step = self._decode if self.forward.decode else self._dense
            out[rows, :, :, T - count :] = step(rows, query)
        if not self.forward.decode:
            self.end_prefill(query_BHGTD)
        self.look(query_BHGTD, out)
        return out

    def _alike(self) -> Iterator[slice]:
        # requests on their own, but for neighbors that only attend sparsely: those share their calls
        policy, states = self.run.policy, self.run.requests
        shares = self.forward.decode and not self.left_dense
        shares = shares and not policy.selects_before and not policy.observes_fast
        kinds = [
            "" if not count else "fast" if shares and not state.slow else "alone"
            for count, state in zip(self.forward.count, states, strict=True)
        ]
        first = 0
        for kind, group in groupby(kinds):
            stop = first + len(list(group))
            if kind == "fast":
                yield slice(first, stop)
            elif kind:
                yield from (slice(row, row + 1) for row in range(first, stop))
            first = stop

    def look(self, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Let the run's signal and audit, if any, look at a decoding step or the prompt's end."""
        if not (self.forward.decode or self.forward.final):
            return
        if self.run.signals is not None:
            slow = self.run.descriptor.slow
            self.run.signals.see_query(self.layer, query_BHGTD[:, :, :, -1], slow)
        if self.run.audit is not None:
            self.run.audit.look(self, query_BHGTD, out_BHGTE)

    def moved_bytes(self, rows: Sequence[int], *, dense: bool) -> int:
        """Return the bytes of keys and values that some requests' attention reads."""
        states = [self.run.requests[row] for row in rows]
        tokens = sum(
            state.length if dense else state.packed_tokens + state.length - state.recent_start
            for state in states
        )
        return tokens * self.pages.row_bytes

    def end_prefill(self, query_BHGTD: torch.Tensor) -> None:
        """Make the first selection, or keep the queries that will make it after the prompt's next piece."""
        if self.run.prompt is not None:
            self.run.prompt.see(self, query_BHGTD)
        if self.run.policy.observes_prompt:
            for context in prompt_blocks(self, query_BHGTD):
                self.run.policy.observe_prompt(context)
        if self.left_dense or not (self.forward.final or self.run.policy.selects_after):
            return
        tails, window = self.run.tails, self.run.policy.config.window_prefill
        old = [tails[self.layer]] if self.layer in tails else []
        last = torch.cat([*old, query_BHGTD[:, :, :, -window:]], 3)[:, :, :, -window:]
        if self.forward.final:
            self.select_first(last)
        else:
            tails[self.layer] = last

    def select_first(self, query_BHGWD: torch.Tensor) -> None:
        """Make the first selection from the prompt's last queries, the last `window_prefill` of W."""
        for row, state in enumerate(self.run.requests):
            if not self.run.policy.selects_in(self.layer):
                self.apply((row,), self._nothing(1, query_BHGWD))
                continue
            window = min(self.run.policy.config.window_prefill, state.length)
            self.refresh((row,), query_BHGWD[row : row + 1, :, :, -window:])

    def refresh(
        self,
        rows: tuple[int, ...],
        query_RHGWD: torch.Tensor,
        logits: Callable[[], torch.Tensor] | None = None,
        log_sum_RHGW: torch.Tensor | None = None,
    ) -> None:
        """Let the policy select anew for some requests.

        Args:
            rows: The requests.
            query_RHGWD: The queries that make the selection.
            logits: Returns their logits, where the attention has made them already.
            log_sum_RHGW: The log-sum-exp of those over J.
        """
        sink = self.run.policy.config.sink
        empty = [
            self.run.requests[row].recent_start == self.run.requests[row].sink(sink) for row in rows
        ]
        if any(empty):  # nothing to select from
            self._refresh_some(rows, empty, query_RHGWD)
            return
        context = self.context(rows, query_RHGWD, logits, log_sum_RHGW)
        selection = self.run.policy.select_after(context)
        self.run.paths[f"{self.backend}.selector"] += len(rows)
        self.apply(rows, selection)

    def _refresh_some(
        self, rows: tuple[int, ...], empty: list[bool], query_RHGWD: torch.Tensor
    ) -> None:
        for place, row in enumerate(rows):
            query = query_RHGWD[place : place + 1]
            if empty[place]:
                self.apply((row,), self._nothing(1, query))
            else:
                self.refresh((row,), query)

    def context(
        self,
        rows: tuple[int, ...],
        query_RHGWD: torch.Tensor,
        logits: Callable[[], torch.Tensor] | None = None,
        log_sum_RHGW: torch.Tensor | None = None,
    ) -> LayerContext:
        """Gather what a policy may look at; arguments are those of `refresh`."""
        return layer_context(self, rows, query_RHGWD, logits, log_sum_RHGW)

    def apply(self, rows: tuple[int, ...], selection: Selection | None) -> None:
        """Pack what was selected for some requests, and tell the observer."""
        if selection is None:
            return
        run, chosen = self.run, self.run.rows(rows)
        with run.observer.span("pack", self.layer):
            run.segment(self.layer).repack(
                chosen.request_R,
                chosen.sink_R,
                selection.index_BHK,
                self.pages,
                run.cache.block_table_BP,
                chosen.most_sink,
            )
        run.paths[f"{self.backend}.pack"] += len(rows)
        for place, row in enumerate(rows):
            note_selection(run, self.layer, row, place, selection)

    def _decode(self, rows: slice, query: torch.Tensor) -> torch.Tensor:
        policy, row = self.run.policy, rows.start
        if self.run.requests[row].slow or self.left_dense:
            if not policy.selects_in(self.layer):
                return self._dense(rows, query)
            # the evidence's logits come with it: a pass over the keys less
            out, logits = self._whole(rows, query, dense_attention_with_logits)
            self.refresh((row,), query, lambda: logits)
            return out
        if policy.selects_before:
            with self.run.observer.span("select_before", self.layer):
                self.apply((row,), policy.select_before(self.context((row,), query)))
        out = self._fast(rows, query)
        if policy.observes_fast:
            policy.observe_fast(self.context((row,), query))
        return out

    def _dense(self, rows: slice, query: torch.Tensor) -> torch.Tensor:
        return self._whole(rows, query, dense_attention.reference)

    def _whole(self, rows: slice, query: torch.Tensor, attention: Callable[..., R]) -> R:
        self.run.paths[
            "torch.dense_attention" if self.forward.decode else "torch.prefill_attention"
        ] += 1
        with self.run.observer.span(
            "attention.dense", self.layer, self.moved_bytes((rows.start,), dense=True)
        ):
            return attention(
                query,
                self.pages.key_PHND,
                self.pages.value_PHNE,
                self.run.cache.block_table_BP[rows],
                self.run.descriptor.length_B[rows],
                **self.options,
            )

    def _fast(self, rows: slice, query: torch.Tensor) -> torch.Tensor:
        segment, which = self.run.segments[self.layer], range(rows.start, rows.stop)
        self.run.paths["torch.sparse_attention"] += len(which)
        with self.run.observer.span(
            "attention.fast", self.layer, self.moved_bytes(which, dense=False)
        ):
            out = sparse_attention.reference(
                query[:, :, :, 0],
                segment.key_BHSD[rows],
                segment.value_BHSE[rows],
                segment.length_BH[rows],
                self.pages.key_PHND,
                self.pages.value_PHNE,
                self.run.cache.block_table_BP[rows],
                self.run.descriptor.recent_start_B[rows],
                self.run.descriptor.length_B[rows],
                **self.options,
            )
        return out[:, :, :, None]

    @staticmethod
    def _nothing(count: int, query: torch.Tensor) -> Selection:
        return Selection(query.new_empty(count, query.shape[1], 0, dtype=torch.int32))


def note_selection(run: Run, layer: int, row: int, place: int, selection: Selection) -> None:
    """Note what a layer packed for a request, the `place`-th of a selection, and tell the observer."""
    state = run.requests[row]
    sink = state.sink(run.policy.config.sink)
    # Top-K pads only where fewer than K positions are allowed: the count needs no look at the device
    allowed = state.recent_start - sink
    state.packed_tokens = sink + min(selection.index_BHK.shape[2], allowed)
    run.observer.on_selection(
        SelectionEvent(
            request=state.request,
            step=state.step,
            layer=layer,
            index_HK=selection.index_BHK[place],
            diagnostics={
                name: value[place : place + 1] for name, value in selection.diagnostics.items()
            },
        )
    )
