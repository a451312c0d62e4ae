"""One layer of one forward pass on the Triton kernels: the whole batch in each launch."""

from functools import partial

import torch

from sfi_core.engine.layer import LayerStep
from sfi_core.engine.run import Run
from sfi_kernels.decode_attention import DecodeAttention, decode_attention
from sfi_kernels.dense_attention import dense_attention
from sfi_kernels.step_descriptor import StepDescriptor


class TritonStep(LayerStep):
    """As `LayerStep`; slow and fast requests of a decoding step share a launch."""

    def attend(self, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """See `LayerStep.attend`."""
        with self.run.counted(self.layer):
            if self.forward.decode:
                out = self._decode_all(query_BHGTD)
            else:
                out = self._prefill(query_BHGTD)
                self.end_prefill(query_BHGTD)
            self.look(query_BHGTD, out)
            return out

    def _decode_all(self, query_BHG1D: torch.Tensor) -> torch.Tensor:
        run, policy = self.run, self.run.policy
        step = run.dense_descriptor if self.left_dense else run.descriptor
        assert step is not None, "the pass has been described"
        if policy.selects_before and step.fast:
            with run.observer.span("select_before", self.layer):
                context = self.context(step.fast, self._of(step.fast, query_BHG1D))
                self.apply(step.fast, policy.select_before(context))
        into = self.room(step, query_BHG1D)
        kind = "mixed" if step.fast and step.slow else "fast" if step.fast else "dense"
        moved = self.moved_bytes(step.slow, dense=True) + self.moved_bytes(step.fast, dense=False)
        with run.observer.span(f"attention.{kind}", self.layer, moved):
            result = self.attention(step, query_BHG1D, into)
        count_attention(run, step)
        if result.logits_BHGWT is not None:
            query = self._of(step.slow, query_BHG1D)
            run.maintenance.submit(partial(self._maintain, step.slow, query, result))
        if policy.observes_fast:
            for row in step.fast:
                policy.observe_fast(self.context((row,), query_BHG1D[row : row + 1]))
        return result.out_BHGE[:, :, :, None]

    def room(self, step: StepDescriptor, query_BHG1D: torch.Tensor) -> torch.Tensor | None:
        """Return where the slow requests' evidence goes; None where nobody wants it."""
        if not (self.run.policy.selects_in(self.layer) and step.slow_rows):
            return None
        _, H, G, _, _ = query_BHG1D.shape
        numbers = step.slow_rows * H * G * self.run.cache.capacity
        return self.run.maintenance.room(numbers, query_BHG1D.device)

    def attention(
        self, step: StepDescriptor, query_BHG1D: torch.Tensor, into: torch.Tensor | None
    ) -> DecodeAttention:
        """Attend with the whole batch, and put the slow requests' evidence `into` a buffer."""
        run, segment = self.run, self.run.segment(self.layer)
        return decode_attention.triton(
            query_BHG1D[:, :, :, 0],
            segment.key_BHSD,
            segment.value_BHSE,
            segment.length_BH,
            self.pages.key_PHND,
            self.pages.value_PHNE,
            run.cache.block_table_BP,
            step,
            **self.options,
            evidence=into is not None,
            into=into,
        )

    def _maintain(
        self, rows: tuple[int, ...], query_RHG1D: torch.Tensor, result: DecodeAttention
    ) -> None:
        logits = result.logits_BHGWT
        assert logits is not None, "evidence was asked for"
        with self.run.counted(self.layer):
            self.refresh(rows, query_RHG1D, lambda: logits, result.log_sum_BHGW)

    def _prefill(self, query_BHGTD: torch.Tensor) -> torch.Tensor:
        self.run.paths["triton.prefill_attention"] += len(self.run.descriptor.slow)
        moved = self.moved_bytes(self.run.descriptor.slow, dense=True)
        with self.run.observer.span("attention.dense", self.layer, moved):
            return dense_attention.triton(
                query_BHGTD,
                self.pages.key_PHND,
                self.pages.value_PHNE,
                self.run.cache.block_table_BP,
                self.run.descriptor.length_B,
                **self.options,
            )

    def _of(self, rows: tuple[int, ...], query_BHGTD: torch.Tensor) -> torch.Tensor:
        if len(rows) == query_BHGTD.shape[0]:
            return query_BHGTD
        return query_BHGTD[self.run.rows(rows).request_R.long()]


def count_attention(run: Run, step: StepDescriptor) -> None:
    """Count a layer's attention."""
    run.paths["triton.dense_attention"] += len(step.slow)
    run.paths["triton.sparse_attention"] += len(step.fast)
