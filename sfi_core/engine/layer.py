"""One layer of the forward pass under way, as attention, selections and watchers see it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sfi_core.engine.run import Run
from sfi_core.errors import NumericsError
from sfi_kernels.compiled import fastest
from sfi_kernels.dense_attention import dense_attention, dense_attention_with_logits, window_logits
from sfi_kernels.pages import Ring, read_pages
from sfi_kernels.step_descriptor import StepDescriptor

FEW = 8  # queries of a request that compiled loops take sooner than matrix products


class Layer:
    """A view of one layer of a run, whose store already holds the layer's new keys and values.

    The layer is `left_dense` if it is one of `dense_layers`; `chooses` says whether the policy chooses for the whole
    batch here. The ops take `logit_options`, the scale and soft cap of the logits, or `options`, which have the learned
    sink logits too. `dense_heads` has by row the KV heads that read everything, if the policy mixes heads in a step.
    `new` are the pass's keys [B, H, T, D] and values [B, H, T, E], a request's own last, if the host hands them over.
    `ring` is the store's. `later` are selections to run after the watchers.
    """

    def __init__(
        self, run: Run, index: int, *, scale: float, soft_cap: float | None = None,
        sink_HG: torch.Tensor | None = None, new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.run, self.index, self.batch_pass = run, index, run.batch_pass
        self.backend = run.store.backend
        self.pages, self.ring = run.store.pages(index), run.store.ring(index)
        self.left_dense = index in run.policy.config.dense_layers
        self.logit_options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
        self.options = run.options[index] = {**self.logit_options, "sink_HG": sink_HG}
        self.new = new
        self.in_place = run.in_place
        self.chooses = run.policy.chooses and not self.left_dense
        self.dense_heads: dict[int, Sequence[int]] = {}
        self.later: list[Callable[[], None]] = []

    @property
    def near(self) -> Ring:
        """Pages on the device with the recent tokens: the ring, or those of all tokens."""
        return self.ring or Ring(self.pages.key_PHND, self.pages.value_PHNE, self.run.store.block_table_BP)

    @property
    def step(self) -> StepDescriptor:
        """The pass's descriptor for this layer; `dense_layers` have one of their own."""
        return self.batch_pass.descriptor_of(left_dense=self.left_dense)

    def finish(self, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Call the watchers, then run the selections that wait in `later`."""
        self.run.tell(self, query_BHGTD, out_BHGTE)
        for select in self.later:
            select()

    def moved_bytes(self, rows: Sequence[int], *, dense: bool) -> int:
        """Return the bytes of keys and values that the attention of some requests reads."""
        tokens = sum(self.run.requests[row].read(dense=dense) for row in rows)
        return round(tokens * self.pages.row_bytes)

    def dense(self, row: int, query_1HGWD: torch.Tensor) -> torch.Tensor:
        """Attend causally with a request's last W queries to its whole history, [1, H, G, W, E]."""
        return dense_attention.on(self.backend)(query_1HGWD, *self._whole(row), **self.options)

    def decodes_by(self, query_1HGWD: torch.Tensor) -> str:
        """Return the backend of dense attention with a decoding request's queries: numba's loops take a few."""
        if query_1HGWD.shape[3] > FEW:
            return self.backend
        return fastest(self.backend, query_1HGWD.device, self.pages.key_PHND, self.pages.value_PHNE)

    def dense_with_logits(self, row: int, query_1HGWD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as `dense` does; also return the last query's logits: the evidence."""
        by = self.decodes_by(query_1HGWD)
        # quicker than one pass for both
        if by != "numba" and query_1HGWD.shape[3] > 1 and query_1HGWD.dtype == torch.float32:
            return self.dense(row, query_1HGWD), self.logits((row,), query_1HGWD[:, :, :, -1:])
        return dense_attention_with_logits.on(by)(query_1HGWD, *self._whole(row), **self.options)

    def check_prompt(self, row: int, query_1HGWD: torch.Tensor, out_1HGWE: torch.Tensor) -> None:
        """Raise `NumericsError` if a prompt's attention on a CPU is not finite although its inputs are (bfloat16)."""
        if out_1HGWE.device.type != "cpu" or bool(out_1HGWE.isfinite().all()):
            return
        key_PHND, value_PHNE, (table_P,), _ = self._whole(row)
        length = self.run.requests[row].length
        inputs = query_1HGWD, *(read_pages(pages, table_P, 0, length) for pages in (key_PHND, value_PHNE))
        if all(bool(part.isfinite().all()) for part in inputs):
            dtype = str(out_1HGWE.dtype).removeprefix("torch.")
            raise NumericsError(
                f"attention of a prompt must be finite, got NaN or infinity in {dtype} in layer {self.index}, of "
                "finite queries, keys and values; load the model in float32 (sfi doctor tries the dtypes)"
            )

    def verify(self, row: int, query_1HGWD: torch.Tensor) -> torch.Tensor:
        """Attend as `dense` does, with the one query of a decoding request, or the few of a verification."""
        if (by := self.decodes_by(query_1HGWD)) == "numba":
            return dense_attention.on(by)(query_1HGWD, *self._whole(row), **self.options)
        if query_1HGWD.shape[3] == 1 or query_1HGWD.dtype == torch.float32:
            return self.dense(row, query_1HGWD)
        return self.dense_with_logits(row, query_1HGWD)[0]

    def heads(
        self, row: int, query_1HG1D: torch.Tensor, heads: Sequence[int], *, evidence: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend densely with some KV heads of a request, one by one, so that no head is copied.

        Return their output, [1, R, G, 1, E], and with `evidence` all heads' logits, -inf for heads not asked for.
        """
        length, (key_PHND, value_PHNE, *rows) = self.run.requests[row].length, self._whole(row)
        sink_HG, logits, outs = self.options["sink_HG"], None, []
        if evidence:
            logits = query_1HG1D.new_full((*query_1HG1D.shape[:4], length), -torch.inf, dtype=torch.float32)
        for head in heads:
            only = slice(head, head + 1)
            options = {**self.logit_options, "sink_HG": None if sink_HG is None else sink_HG[only]}
            operands = query_1HG1D[:, only], key_PHND[:, only], value_PHNE[:, only], *rows
            if logits is None:
                out = dense_attention.on(self.backend)(*operands, **options)
            else:
                out, logits[:, only] = dense_attention_with_logits.on(self.backend)(*operands, **options)
            outs.append(out)
        return torch.cat(outs, 1), logits

    def logits(self, rows: Sequence[int], query_RHGWD: torch.Tensor) -> torch.Tensor:
        """Return the logits of some requests' last W queries, [R, H, G, W, T] float32."""
        chosen, (D, E) = self.run.rows(tuple(rows)), (x.shape[3] for x in self.pages.tensors[:2])
        self.run.store.count_read(self.index, sum(self.run.requests[row].length for row in rows) * D / (D + E))
        return window_logits.on(self.backend)(
            query_RHGWD, self.pages.key_PHND, chosen.table_RP, chosen.length_R, **self.logit_options,
            longest=chosen.longest,
        )  # fmt: skip

    def _whole(self, row: int) -> tuple[torch.Tensor, ...]:
        only, step = slice(row, row + 1), self.batch_pass.descriptor
        table_1P, length_1 = self.run.store.block_table_BP[only], step.length_B[only]
        return self.pages.key_PHND, self.pages.value_PHNE, table_1P, length_1
