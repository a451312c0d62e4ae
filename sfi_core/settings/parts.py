"""The tables of a config: the Selector's hyperparameters, and the other methods' settings."""

import math
from dataclasses import dataclass

from sfi_core.settings.fields import check, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """Hyperparameters of the Selector (Algorithm 2); each field says what it does."""

    alpha: float = setting(
        0.5,
        "Exponent of the window's power mean, Eq. 7. Paper gap: the released code's.",
        above=0,
        most=1,
    )
    gamma: float = setting(
        0.5, "Strength of the key-norm penalty, Eq. 9. Paper gap: the released code's.", least=0
    )
    beta: float = setting(
        -math.log(0.6) / 0.9,
        "Strength of the global recency decay, Eq. 11. Paper gap: the released code's.",
        least=0,
    )
    power: float = setting(
        1.8, "Curvature p of the recency decay, Eq. 11. Paper gap: the released code's.", least=1
    )
    eta: float = setting(
        0.4, "Strength of the tail brake, Eq. 11. Paper gap: the released code's.", least=0
    )
    lambda_clip: float = setting(
        0.02, "Upper bound of the prior's weight, Eq. 17.", least=0, most=1
    )
    alpha_soft: float = setting(0.5, "Soft-NMS strength, Eq. 21.", least=0)
    radius: int = setting(
        16,
        "Half-width of the neighborhood N(j), in tokens. Paper gap: the released code's.",
        least=0,
    )
    alpha_cross: float = setting(0.35, "Cross-head exclusivity strength, Eq. 23.", least=0)
    temperature: float = setting(
        2.0, "Temperature T of Eq. 22. Paper gap: the released code's.", above=0
    )

    def __post_init__(self) -> None:
        """Reject values of another type or outside the paper's ranges."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig:
    """Settings of the other methods, `sfi` looks at none of them; each field says what it does."""

    page: int = setting(16, "Tokens of a page of Quest's.", least=1)

    def __post_init__(self) -> None:
        """Reject values of another type or out of range."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeKVConfig:
    """Settings of FreeKV (Liu et al., 2025); each field says what it does."""

    page: int = setting(32, "Tokens of a page, which is selected and recalled whole.", least=1)
    tau: float = setting(
        0.8,
        "A KV head whose pooled query cosine is below this selects before it attends; -1 never, and 1 always "
        "but for equal queries. The paper takes 0.8 for long inputs and 0.9 for long generations.",
        least=-1,
        most=1,
    )
    first_layer_dense: bool = setting(
        True, "Leave the first full-attention layer dense, as the paper does."
    )

    def __post_init__(self) -> None:
        """Reject values of another type or out of range."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncKVConfig:
    """Settings of SyncKV; each field says what it does."""

    heads: str | None = setting(
        None,
        "File of head clusters, from `sfi tune heads`; none is heads.json in the model's folder. even splits "
        "each layer's KV heads into `representatives` groups of neighbors, for models without meaning.",
    )
    representatives: int = setting(
        2, "Representative heads of a layer, N_r, where heads is even.", least=1
    )
    stride: int = setting(5, "Steps from one anticipation to the next, the paper's m.", least=1)
    static: float = setting(
        0.5,
        "Share of the budget that keeps the prompt's selection, the paper's rho.",
        least=0,
        most=1,
    )
    suspension: str = setting(
        "dense",
        "What representatives read between two anticipations. Paper gap: dense is Algorithm 1, line 22; "
        "sparse lets them read what their cluster reads.",
        choices=("dense", "sparse"),
    )

    def __post_init__(self) -> None:
        """Reject values of another type or out of range."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeScanConfig:
    """Settings of `codescan`; each field says what it does."""

    rest: float = setting(
        0.2,
        "Share of the estimated weight of what is not read that the pseudo token gets, with the mean value; "
        "0 for no pseudo token.",
        least=0,
        most=1,
    )

    def __post_init__(self) -> None:
        """Reject values of another type or out of range."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How a lossless run drafts and verifies; each field says what it does."""

    max_tokens: int = setting(16, "Most tokens drafted before a verification.", least=1)
    adaptive: bool = setting(
        True,
        "Draft no more tokens than pay by the request's running acceptance and the bytes that a fast step "
        "and a verification read.",
    )

    def __post_init__(self) -> None:
        """Reject values of another type or out of range."""
        check(self)
