"""The Selector's scores: evidence, prior, fusion, refinement (Algorithm 2)."""

from sfi_kernels.op import Op
from sfi_kernels.selector import reference
from sfi_kernels.selector.formulas import (
    attention_probability,
    evidence,
    exclude_across_heads,
    fuse,
    key_norm_factor,
    log_score,
    normalized_position,
    pool_by_page,
    pool_neighbors,
    position_factor,
    power_mean,
    prior,
    soft_nms,
    stable_weight,
)

selector = Op(reference.selector)

__all__ = [
    "attention_probability", "evidence", "exclude_across_heads", "fuse", "key_norm_factor", "log_score",
    "normalized_position", "pool_by_page", "pool_neighbors", "position_factor", "power_mean", "prior", "selector",
    "soft_nms", "stable_weight",
]  # fmt: skip
