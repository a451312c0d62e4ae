"""The tables of a config, and the checks that every part of it shares."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sfi_core.errors import ConfigError


def require(ok: bool, message: str) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(message)


def at_least(config: object, bounds: Mapping[str, float]) -> None:
    """Reject values below their bounds, and those that are not finite."""
    for name, least in bounds.items():
        value = getattr(config, name)
        require(
            math.isfinite(value) and value >= least, f"{name} must be at least {least}, got {value}"
        )


def check_names(cls: type, changes: Mapping[str, Any]) -> None:
    """Reject names that are no fields."""
    known = tuple(get_type_hints(cls))
    for name in changes:
        require(name in known, f"unknown setting {name!r}; expected one of {known}")


def check_types(config: object) -> None:
    """Give every field its type, or reject its value."""
    for name, hint in get_type_hints(type(config)).items():
        object.__setattr__(config, name, _typed(name, getattr(config, name), hint))


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return the value as its field holds it: a float for an int, a tuple for a list."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return None
    kind = kinds[0]
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        fits = isinstance(value, list | tuple) and all(type(v) is item for v in value)
        require(fits, f"{name} must be a list of {item.__name__}, got {value!r}")
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    wanted = "a table" if dataclasses.is_dataclass(kind) else kind.__name__
    require(type(value) is kind, f"{name} must be {wanted}, got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """Hyperparameters of the Selector (Algorithm 2).

    Attributes:
        alpha: Exponent of the window's power mean, Eq. 7. In (0, 1]. Paper gap: the released code's.
        gamma: Strength of the key-norm penalty, Eq. 9. Paper gap: the released code's.
        beta: Strength of the global recency decay, Eq. 11. Paper gap: the released code's.
        power: Its curvature p, Eq. 11. At least 1. Paper gap: the released code's.
        eta: Strength of the tail brake, Eq. 11. Paper gap: the released code's.
        position_weight: Exponent on Eq. 11's whole factor; 1 is the paper.
        lambda_clip: Upper bound of the prior's weight, Eq. 17. In [0, 1].
        lambda_clip_rows: The bound where several evidence rows are averaged; None takes `lambda_clip`.
        alpha_soft: Soft-NMS strength, Eq. 21.
        radius: Half-width of the neighborhood N(j), in tokens. Paper gap: the released code's.
        alpha_cross: Cross-head exclusivity strength, Eq. 23.
        temperature: T of Eq. 22. Paper gap: the released code's.
    """

    alpha: float = 0.5
    gamma: float = 0.5
    beta: float = -math.log(0.6) / 0.9
    power: float = 1.8
    eta: float = 0.4
    position_weight: float = 1.0
    lambda_clip: float = 0.02
    lambda_clip_rows: float | None = None
    alpha_soft: float = 0.5
    radius: int = 16
    alpha_cross: float = 0.35
    temperature: float = 2.0

    def __post_init__(self) -> None:
        """Reject values of another type or outside the paper's ranges."""
        check_types(self)
        least = dict.fromkeys(
            ("gamma", "beta", "eta", "position_weight", "alpha_soft", "radius", "alpha_cross"), 0
        )
        at_least(self, {**least, "power": 1})
        require(0 < self.alpha <= 1, f"alpha must be in (0, 1], got {self.alpha}")
        require(
            0 < self.temperature < math.inf,
            f"temperature must be positive and finite, got {self.temperature}",
        )
        for name in ("lambda_clip", "lambda_clip_rows"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"{name} must be in [0, 1], got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig:
    """Settings of the other methods; `sfi` looks at none of them.

    Attributes:
        pool: Positions over which SnapKV averages and RefreshKV takes the maximum of a score. Odd.
        page: Tokens of a page of Quest's.
        select_layers: Layers of TidalDecode that attend densely and choose for those after them. None is its
            layer 2 and its correction layer, 13 of 32, at the same share of the model's depth.
    """

    pool: int = 5
    page: int = 16
    select_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Reject values of another type or out of range."""
        check_types(self)
        at_least(self, {"pool": 1, "page": 1})
        require(self.pool % 2 == 1, f"pool must be odd, got {self.pool}")
        layers = self.select_layers
        require(
            layers is None or min(layers, default=-1) >= 0,
            f"select_layers must be layers from 0 on, at least one, got {list(layers or ())}",
        )
