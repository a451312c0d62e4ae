"""The bytes that a run read compared with full attention: a bound on its speedup on any machine."""

from dataclasses import dataclass
from typing import Self

from sfi_core.engine.report import RunReport
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.describe import describe_model
from sfi_core.policies.built_in.codescan import choosing_tokens
from sfi_core.sizes.policy import PolicyReads
from sfi_core.sizes.step import ByteModel, fast_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLimit:
    """The bytes read per decoded token, and the largest possible speedup.

    Read are keys, values, scores, and the weights, which the requests decoded together share. `speedup` is full
    attention's bytes over them: an upper bound if memory bandwidth is the bottleneck. From `break_even_context` cached
    tokens on a run with these settings and this share of slow steps reads less than full attention; None if there are
    none, or if the policy selects on fast steps or mixes heads. `read_ratio` is the share of the cached tokens that was
    read, choosing included; `codescan_read_ratio` what codescan would read with the same budget, None for a lossless
    run and for a policy without refreshes. On four models codescan is 23 to 39 times closer to full attention at equal
    reads (docs/evidence.md).
    """

    speedup: float
    break_even_context: int | None
    read_ratio: float
    codescan_read_ratio: float | None

    @classmethod
    def of(cls, session: Session, report: RunReport, slots: int) -> Self | None:
        """Sum a run up; None for full attention, or if nothing was decoded after the first tokens."""
        policy = session.policy
        decoded = sum(len(request.token_ids) - 1 for request in report.requests if request.token_ids)
        if not (decoded and policy.selects):
            return None
        steps = [max(0, len(request.token_ids) - 1) / decoded for request in report.requests]
        pairs = list(zip(steps, report.requests, strict=True))
        context = sum(share * (request.prompt_tokens + len(request.token_ids) / 2) for share, request in pairs)
        attended = sum(share * request.mean_attended_tokens for share, request in pairs)
        selecting = sum(share * request.mean_selection_tokens for share, request in pairs)
        slow = sum(max(0, request.slow_steps - 1) for request in report.requests) / decoded
        config = policy.config
        description = describe_model(session.model, session.shapes())
        exact = any(request.lossless for request in report.requests)
        widths = {shape.key_width for shape in session.shapes() if shape.window is None}
        model = ByteModel.of(description, dense_layers=config.dense_layers, batch=slots)
        packed = min(context, config.sink + config.budget)
        read = float(model.mean(context, attended + selecting, packed, slow))
        dense = float(model.dense(context))
        unknown = selecting or policy.mixes_heads
        codescan: float | None = None  # the rows of a fast step, and what choosing them reads
        if policy.refreshes() and not exact:
            choosing = max(choosing_tokens(context, width) for width in widths)
            codescan = (fast_tokens(config, config.budget, 0.0) + choosing) / context
        return cls(
            speedup=dense / read,
            break_even_context=None if unknown else PolicyReads(policy, True, slow, 0.0).break_even(model),
            read_ratio=(attended + selecting) / context,
            codescan_read_ratio=codescan,
        )

    def advice(self, policy: str) -> str | None:
        """Say in one line that full attention should be faster, or codescan closer for fewer reads; None if neither."""
        if self.speedup > 1:
            other = self.codescan_read_ratio
            if other is None or other >= self.read_ratio:
                return None
            reads = f"{100 * other:.1f} % of the context, {policy} read {100 * self.read_ratio:.1f} %"
            return f"--policy codescan should be closer to full attention for fewer reads: {reads}"
        if self.break_even_context is None:
            reads = f"{policy} read {1 / self.speedup:.2f} times as many bytes"
        else:
            tokens = f"{self.break_even_context:,} tokens on"
            reads = f"at this budget and slow rate {policy} reads less from {tokens}"
        return f"full-kv should be faster here: {reads}"
