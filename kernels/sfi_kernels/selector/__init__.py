"""The Selector's scores: evidence, prior, fusion, refinement (Algorithm 2).

`evidence` and `prior` are the functions here; files of these names hold them.
"""

from sfi_kernels.op import Op
from sfi_kernels.selector import reference
from sfi_kernels.selector.evidence import attention_probability, evidence, pool_neighbors, power_mean
from sfi_kernels.selector.prior import fuse, key_norm_factor, normalized_position, position_factor, prior, stable_weight
from sfi_kernels.selector.refinement import exclude_across_heads, log_score, pool_by_page, soft_nms

selector = Op(reference.selector)

__all__ = [
    "attention_probability",
    "evidence",
    "exclude_across_heads",
    "fuse",
    "key_norm_factor",
    "log_score",
    "normalized_position",
    "pool_by_page",
    "pool_neighbors",
    "position_factor",
    "power_mean",
    "prior",
    "selector",
    "soft_nms",
    "stable_weight",
]  # fmt: skip
