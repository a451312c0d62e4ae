"""The nested tables of `SfiConfig`: the Selector, the other methods, and drafting."""

import math
from dataclasses import dataclass

from sfi_core.settings.fields import Table, setting

WIDEST = 1 << 16  # tokens of a page or a window: beyond, memory runs out before a model does
PAGE_SCORES = ("bounds", "deviation")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig(Table):
    """Hyperparameters of the Selector (Algorithm 2)."""

    alpha: float = setting(
        0.5, "Exponent of the window's power mean, Eq. 7. Paper gap: the released code's.", above=0, most=1
    )
    gamma: float = setting(0.5, "Strength of the key-norm penalty, Eq. 9. Paper gap: the released code's.", least=0)
    beta: float = setting(
        -math.log(0.6) / 0.9, "Strength of the global recency decay, Eq. 11. Paper gap: the released code's.", least=0
    )
    power: float = setting(1.8, "Curvature p of the recency decay, Eq. 11. Paper gap: the released code's.", least=1)
    eta: float = setting(0.4, "Strength of the tail brake, Eq. 11. Paper gap: the released code's.", least=0)
    lambda_clip: float = setting(0.02, "Upper bound of the prior's weight, Eq. 17.", least=0, most=1)
    alpha_soft: float = setting(0.5, "Soft-NMS strength, Eq. 21.", least=0)
    radius: int = setting(
        16, "Half-width of the neighborhood N(j), in tokens. Paper gap: the released code's.", least=0, most=WIDEST
    )
    alpha_cross: float = setting(0.35, "Cross-head exclusivity strength, Eq. 23.", least=0)
    temperature: float = setting(2.0, "Temperature T of Eq. 22. Paper gap: the released code's.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig(Table):
    """Settings of Quest."""

    page: int = setting(16, "Tokens of a page under quest.", least=1)
    score: str = setting(
        "bounds",
        "A page's score under quest: the paper's bound of its logits, or, in a variant of ours, their mean plus "
        "their deviation.",
        choices=PAGE_SCORES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeKVConfig(Table):
    """Settings of FreeKV (Liu et al., 2025)."""

    page: int = setting(32, "Tokens of a page under freekv, which selects and recalls whole pages.", least=1)
    tau: float = setting(
        0.8,
        "A KV head selects before it attends if the pooled cosine of its query with the last step's is below "
        "this: with -1 never, with 1 whenever the query has changed. The paper takes 0.8 for long inputs and "
        "0.9 for long generations.",
        least=-1,
        most=1,
    )
    first_layer_dense: bool = setting(True, "Leave the first full-attention layer dense, as the paper does.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncKVConfig(Table):
    """Settings of SyncKV."""

    heads: str | None = setting(
        None,
        "File of head clusters, from `sfi tune heads`; none is heads.json in the model's folder. even takes groups "
        "of four neighbors as clusters, for random weights.",
    )
    stride: int = setting(5, "Steps from one anticipation to the next, the paper's m.", least=1)
    static: float = setting(
        0.5, "Share of the budget for positions of the prompt that stay selected, the paper's rho.", least=0, most=1
    )
    suspension: str = setting(
        "dense",
        "What representatives read between two anticipations. Paper gap: dense is Algorithm 1, line 22; "
        "sparse lets them read what their cluster reads.",
        choices=("dense", "sparse"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeScanConfig(Table):
    """Settings of `codescan`."""

    rest: float = setting(
        0.2,
        "A pseudo token with the mean value stands for all that is not read. This is its share of the "
        "estimated attention on that; 0 for no pseudo token.",
        least=0,
        most=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(Table):
    """How many tokens a lossless run drafts."""

    max_tokens: int = setting(16, "Most tokens drafted before a verification.", least=1)
    adaptive: bool = setting(
        True,
        "Draft as many tokens as give the most tokens per byte, by the share of the request's drafts that "
        "were accepted so far and the bytes that a fast step and a verification read.",
    )
