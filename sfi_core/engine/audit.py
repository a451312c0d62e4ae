"""The audit: what dense attention would have read, beside what a step read; the run stays as it is."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from sfi_core.observers.events import AuditEvent
from sfi_core.settings.audit import AuditConfig
from sfi_kernels.dense_attention import dense_attention, window_logits
from sfi_kernels.top_k import top_k

if TYPE_CHECKING:
    from sfi_core.engine.layer import LayerStep
    from sfi_core.state.request import SparseState


@dataclass(slots=True)
class Audit:
    """The audit of one run.

    Attributes:
        config: What to audit.
        queries: The last step's query by request and layer, [1, H, G, D].
    """

    config: AuditConfig
    queries: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, config: AuditConfig | None) -> Self | None:
        """Make a run's audit, if it is to have one."""
        return None if config is None else cls(config)

    def due(self, state: "SparseState") -> bool:
        """Say whether a request's current step is audited."""
        return state.slow or state.step % self.config.every == 0

    def look(self, step: "LayerStep", query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Look at every request of a layer that has just attended.

        Args:
            step: The layer's step.
            query_BHGTD: Its queries; the last of T is looked at.
            out_BHGTE: What they read.
        """
        if self.config.layers is not None and step.layer not in self.config.layers:
            return
        with step.run.observer.span("audit", step.layer):
            for row, count in enumerate(step.forward.count):
                if not count:
                    continue
                query, state = query_BHGTD[row : row + 1, :, :, -1], step.run.requests[row]
                if self.due(state):
                    self._look(step, row, query, out_BHGTE[row, :, :, -1])
                self.queries[state.request, step.layer] = query.clone()

    def _look(
        self, step: "LayerStep", row: int, query_1HGD: torch.Tensor, out_HGE: torch.Tensor
    ) -> None:
        state = step.run.requests[row]
        mass_HT = _mass(step, row, query_1HGD)
        H = mass_HT.shape[0]
        index_HK = top_k.on(step.backend)(mass_HT[None], self.config.top)[0]
        retained_H, error_H = mass_HT.new_ones(H), mass_HT.new_zeros(H)
        if not (state.slow or step.left_dense):
            retained_H = _retained(step, row, mass_HT)
            error_H = _error(step, row, query_1HGD, out_HGE)
        last = self.queries.get((state.request, step.layer))
        cosine_H = mass_HT.new_full((H,), torch.nan)
        if last is not None:
            cosine_H = torch.cosine_similarity(query_1HGD[0].float(), last[0].float(), -1).mean(1)
        heads = self.config.heads or tuple(range(H))
        step.run.observer.on_audit(
            AuditEvent(
                request=state.request,
                step=state.step,
                layer=step.layer,
                slow=state.slow,
                heads=heads,
                index_HK=_of(heads, index_HK),
                mass_HK=_of(heads, _at(mass_HT, index_HK)),
                retained_H=_of(heads, retained_H),
                query_cosine_H=_of(heads, cosine_H),
                output_error_H=_of(heads, error_H),
            )
        )


def _paging(step: "LayerStep", row: int) -> dict[str, Any]:
    return {
        "block_table_BP": step.run.cache.block_table_BP[row : row + 1],
        "length_B": step.run.descriptor.length_B[row : row + 1],
    }


def _mass(step: "LayerStep", row: int, query_1HGD: torch.Tensor) -> torch.Tensor:
    logits = window_logits.on(step.backend)(
        query_1HGD[:, :, :, None],
        step.pages.key_PHND,
        **_paging(step, row),
        **step.logit_options,
        longest=step.run.requests[row].length,
    )
    mass_HT: torch.Tensor = logits[0, :, :, 0].softmax(-1).mean(1)
    return mass_HT


def _at(mass_HT: torch.Tensor, index_HK: torch.Tensor) -> torch.Tensor:
    return mass_HT.gather(1, index_HK.clamp_min(0).long()) * (index_HK >= 0)


def _of(heads: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    # one by one: a list as an index would wait for the device
    return value if len(heads) == len(value) else torch.stack([value[head] for head in heads])


def _retained(step: "LayerStep", row: int, mass_HT: torch.Tensor) -> torch.Tensor:
    # the packed segment (sinks and selected) and the recent segment do not overlap
    packed_HS = _at(mass_HT, step.run.segments[step.layer].position_BHS[row])
    return packed_HS.sum(1) + mass_HT[:, step.run.requests[row].recent_start :].sum(1)


def _error(
    step: "LayerStep", row: int, query_1HGD: torch.Tensor, out_HGE: torch.Tensor
) -> torch.Tensor:
    dense = dense_attention.on(step.backend)(
        query_1HGD[:, :, :, None],
        step.pages.key_PHND,
        step.pages.value_PHNE,
        **_paging(step, row),
        **step.options,
    )
    dense_HX = dense[0, :, :, 0].float().flatten(1)
    error_H: torch.Tensor = (out_HGE.float().flatten(1) - dense_HX).norm(dim=1) / dense_HX.norm(
        dim=1
    )
    return error_H
