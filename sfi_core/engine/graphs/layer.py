"""One layer of a decoding step as a CUDA graph may hold it: the device's work, whoever the requests are."""

from functools import partial

import torch

from sfi_core.engine.backends.triton import TritonStep, count_attention
from sfi_core.engine.layer import note_selection
from sfi_core.engine.run import Run
from sfi_core.policies.base import LayerContext, Selection
from sfi_kernels.decode_attention import DecodeAttention


class StaticStep(TritonStep):
    """As `TritonStep`, but asks the host for nothing that changes from step to step, and tells it nothing."""

    def attend(self, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """See `LayerStep.attend`."""
        run, fixed = self.run, self.run.fixed
        assert fixed is not None, "the run has what its steps share"
        step = fixed.dense if self.left_dense else fixed.descriptor
        assert step is not None, "the pass has been described"
        with run.counted(self.layer):
            result = self.attention(step, query_BHGTD, self.room(step, query_BHGTD))
        if result.logits_BHGWT is not None:
            run.maintenance.submit(partial(self._select, result))
        return result.out_BHGE[:, :, :, None]

    def _select(self, result: DecodeAttention) -> None:
        run, fixed = self.run, self.run.fixed
        assert fixed is not None, "the run has what its steps share"
        rows, logits = fixed.rows, result.logits_BHGWT
        assert rows is not None, "the step refreshes"
        assert logits is not None, "evidence was asked for"
        with run.counted(self.layer):
            selection = run.policy.select_after(
                LayerContext(
                    layer=self.layer,
                    requests=(),
                    backend=self.backend,
                    allowed_BT=rows.allowed_RT,
                    key_norm_BHT=run.cache.norms_of(self.layer, rows.table_RP),
                    logits=lambda: logits,
                    log_sum_BHGW=result.log_sum_BHGW,
                )
            )
            assert selection is not None, "a policy that selects apart selects"
            run.segment(self.layer).repack(
                rows.request_R,
                rows.sink_R,
                selection.index_BHK,
                self.pages,
                run.cache.block_table_BP,
                rows.most_sink,
            )
        fixed.selections[self.layer] = selection


def note_step(run: Run, selections: dict[int, Selection], places: dict[int, int]) -> None:
    """Note on the host what a replayed step did, as its layers would have.

    Args:
        run: The run; its step is described.
        selections: What the layers selected, by layer.
        places: The slow requests' rows there.
    """
    sink = run.policy.config.sink
    for layer in sorted(run.layers):
        left_dense = layer in run.policy.config.dense_layers
        step = run.dense_descriptor if left_dense else run.descriptor
        assert step is not None, "the pass has been described"
        count_attention(run, step)
        if layer not in selections:
            continue
        run.paths["triton.pack"] += len(step.slow)
        for row in step.slow:
            state, selection = run.requests[row], selections[layer]
            if state.recent_start == state.sink(sink):  # nothing to select from
                selection = Selection(selection.index_BHK[:, :, :0])
            else:
                run.paths["triton.selector"] += 1
            note_selection(run, layer, row, places[row], selection)
