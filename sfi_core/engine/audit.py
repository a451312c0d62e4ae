"""The audit compares a step's sparse attention with dense attention; it does not change the run. The dense twin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sfi_core.engine.batch_pass import SeenLayer
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.observers.events import AuditEvent
from sfi_core.observers.observer import NullObserver
from sfi_core.policies.base import Policy
from sfi_core.settings.engine import AuditConfig
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import FAST, SLOW
from sfi_kernels.top_k import top_k


@dataclass(slots=True)
class Audit:
    """The audit of one run; a `Watcher`. `queries` has the last step's by request and layer, [1, H, G, D]."""

    config: AuditConfig
    queries: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Audit the last query of every request that gets a token from this pass and whose step is due."""
        assert isinstance(layer, Layer), "the engine's own"
        batch_pass, run = layer.batch_pass, layer.run
        unaudited = self.config.layers is not None and layer.index not in self.config.layers
        if unaudited or not batch_pass.generates:
            return
        with run.observer.span("audit", layer.index):
            for row in (row for row, request in enumerate(batch_pass.passes) if request.generates):
                query, state = query_BHGTD[row : row + 1, :, :, -1], run.requests[row]
                if self.config.due(state.step, slow=state.slow):
                    self._look(layer, row, query, out_BHGTE[row, :, :, -1])
                self.queries[state.request, layer.index] = query.clone()

    def take_queries(self, states: Sequence[RequestState], query_BHGD: Mapping[int, torch.Tensor]) -> None:
        """Take the queries, by layer, of a decoding step for which `see` was not called."""
        for row, state in enumerate(states):
            if state.step > 0 and not state.finished:
                for layer, query in query_BHGD.items():
                    if self.config.layers is None or layer in self.config.layers:
                        self.queries[state.request, layer] = query[row : row + 1].clone()

    def forget(self, request: int) -> None:
        """Drop the queries of a request that has left."""
        for key in [key for key in self.queries if key[0] == request]:
            del self.queries[key]

    def _look(self, layer: Layer, row: int, query_1HGD: torch.Tensor, out_HGE: torch.Tensor) -> None:
        state = layer.run.requests[row]
        mass_HGT = layer.logits((row,), query_1HGD[:, :, :, None])[0, :, :, 0].softmax(-1)
        mass_HT = mass_HGT.mean(1)
        H = mass_HT.shape[0]
        index_HK = top_k.on(layer.backend)(mass_HT[None], self.config.top)[0]
        place_HK = index_HK.clamp_min(0).long()
        read_HT = torch.ones_like(mass_HT, dtype=torch.bool)
        retained_HG, error_H = mass_HGT.new_ones(mass_HGT.shape[:2]), mass_HT.new_zeros(H)
        if row in layer.dense_heads or not (state.slow or layer.left_dense):
            read_HT = _read(layer, row, read_HT)
            retained_HG = (mass_HGT * read_HT[:, None]).sum(-1)
            for head in layer.dense_heads.get(row, ()):
                retained_HG[head] = 1.0
            dense_HX = layer.dense(row, query_1HGD[:, :, :, None])[0, :, :, 0].float().flatten(1)
            error_H = (out_HGE.float().flatten(1) - dense_HX).norm(dim=1) / dense_HX.norm(dim=1)
        last = self.queries.get((state.request, layer.index))
        cosine_H = mass_HT.new_full((H,), torch.nan)
        if last is not None:
            cosine_H = torch.cosine_similarity(query_1HGD[0].float(), last[0].float(), -1).mean(1)
        event = AuditEvent(
            request=state.request, step=state.step, layer=layer.index, slow=state.slow, heads=tuple(range(H)),
            index_HK=index_HK, mass_HK=mass_HT.gather(1, place_HK) * (index_HK >= 0),
            retained_H=retained_HG.mean(1), query_cosine_H=cosine_H, output_error_H=error_H,
            read_HK=read_HT.gather(1, place_HK),
            top_1_read_H=read_HT.gather(1, mass_HGT.argmax(-1)).float().mean(1),
            retained_min_H=retained_HG.amin(1),
        )  # fmt: skip
        layer.run.observer.on(event)


def check_audit(config: AuditConfig, shapes: Sequence[LayerShape]) -> None:
    """Raise `ConfigError` for audited layers that are no full-attention layers of the model."""
    managed = [layer for layer, shape in enumerate(shapes) if shape.window is None]
    odd = sorted(set(config.layers or ()) - set(managed))
    if odd:
        raise ConfigError(f"audit.layers must be among {managed}, got {odd}")


def _read(layer: Layer, row: int, all_HT: torch.Tensor) -> torch.Tensor:
    # the packed segment (sinks and selected), padded with -1, and the recent segment
    H, T = all_HT.shape
    position_HS = layer.run.segments[layer.index].position_BHS[row].long()
    read_HT = all_HT.new_zeros(H, T + 1).scatter(1, position_HS.where(position_HS >= 0, T), 1)[:, :T]
    read_HT[:, layer.run.requests[row].read_start :] = True
    for head in layer.dense_heads.get(row, ()):
        read_HT[head] = True
    return read_HT


def dense_twin(run: Run, count: int | None = None) -> Run:
    """Return a run over the same store in which all are slow, for the pass under way, of at most `count` tokens."""
    policy = Policy(run.policy.config, run.policy.trigger)
    twin = Run(policy, NullObserver(), run.store, device=run.device)
    twin.requests = [replace(state, slow=True) for state in run.requests]
    twin.segments, twin.layers, twin.step = run.segments, run.layers, run.step
    passes = []
    for request in run.batch_pass.passes:
        tokens = request.count if count is None else min(request.count, count)
        passes.append(replace(request, kind=SLOW if request.kind == FAST else request.kind, count=tokens))
    twin.describe(passes, run.batch_pass.start)
    return twin


def divergence(log_p_RV: torch.Tensor, log_q_RV: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) in nats of rows of log-probabilities, [R]; never negative."""
    p_RV = log_p_RV.exp()
    terms = torch.where(p_RV > 0, p_RV * (log_p_RV - log_q_RV), 0.0)
    # rounding may leave the sum just below zero
    return terms.sum(-1).clamp_min(0)


def compare_logits(logits_RV: torch.Tensor, dense_RV: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compare next-token distributions with dense attention's; return the tensors of `LogitsEvent` by name."""
    ours, dense = (x.float().log_softmax(-1) for x in (logits_RV, dense_RV))
    token_R = dense.argmax(-1)
    return {
        "kl_R": divergence(dense, ours),
        "agrees_R": ours.argmax(-1) == token_R,
        "dense_token_R": token_R,
        "dense_probability_R": dense.gather(-1, token_R[:, None])[:, 0].exp(),
    }
