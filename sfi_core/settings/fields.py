"""Settings as fields of dataclasses: a field declares type, default, range and meaning, once."""

import dataclasses
import math
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from sfi_core.errors import ConfigError
from sfi_core.machine.text import shown

LARGEST = 2**53  # of whole numbers: exact as float64 too


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting, as its field declares it.

    `name` is the full one, such as `selector.alpha`; a table's own errors name the field alone. `kind` is bool, int,
    float or str; for a list, the type of its items. The first sentence of `meaning`, the help text, can stand alone.
    `least` and `most` are allowed themselves, `above` is not.
    """

    name: str
    kind: type
    is_list: bool
    optional: bool
    default: Any
    meaning: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        """The type in words: `list of int`, `float or none`."""
        kind = f"{'list of ' if self.is_list else ''}{self.kind.__name__}"
        return f"{kind} or none" if self.optional else kind

    @property
    def range(self) -> str:
        """The allowed values in words; empty where every value of the type is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.most is not None:
            ends = f"[{self.least}" if self.above is None else f"({self.above}"
            return f"in {ends}, {self.most}]"
        if self.above is not None:
            return "positive" if self.above == 0 else f"above {self.above}"
        return "" if self.least is None else f"at least {self.least}"

    @property
    def brief(self) -> str:
        """The first sentence of the meaning."""
        return self.meaning.partition(". ")[0].removesuffix(".") + "."

    def checked(self, value: Any) -> Any:
        """Return the value as the field stores it, int as float, list as tuple; raise `ConfigError` for a wrong one."""
        if value is None and self.optional:
            return None
        wanted = "true or false" if self.kind is bool else self.kind.__name__
        if self.is_list:
            fits = isinstance(value, list | tuple) and all(type(v) is self.kind for v in value)
            require(fits, f"{self.name} must be a list of {wanted}, got {shown(value)}")
            for broken in filter(None, map(self._broken, value)):
                raise ConfigError(f"{self.name} must be {broken} each, got {shown(list(value))}")
            return tuple(value)
        if self.kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        require(type(value) is self.kind, f"{self.name} must be {wanted}, got {shown(value)}")
        if self.choices:
            expected = f"expected one of {self.choices}"
            require(value in self.choices, f"unknown {self.name} {shown(value)}; {expected}")
        broken = self._broken(value)
        require(not broken, f"{self.name} must be {broken}, got {shown(value)}")
        return value

    def _broken(self, value: Any) -> str:
        # the rule that a value breaks, in words; "" for none
        if not isinstance(value, int | float):
            return ""
        if isinstance(value, int) and abs(value) > LARGEST:
            return f"at most {LARGEST:,}"
        enough = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        if math.isfinite(value) and enough and (self.most is None or value <= self.most):
            return ""
        if self.kind is int and self.least is not None and value < self.least:
            return f"at least {self.least}"
        if self.most is None and not math.isfinite(value):
            return f"{self.range} and finite" if self.range else "finite"
        return self.range


class Table:
    """Base of settings dataclasses: checks the names and values of every new instance."""

    __slots__ = ()

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Raise `ConfigError` for a name that is no field."""
        known = tuple(_declared(cls))  # type: ignore[arg-type]  # a class is hashable
        for name in sorted(values.keys() - set(known)):
            near = get_close_matches(name[:80], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {known}"
            raise ConfigError(f"unknown setting {shown(name)}; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Store every value in its declared type; raise `ConfigError` for another type, or one out of range."""
        for name, declared in _declared(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(declared, Setting):
                object.__setattr__(self, name, declared.checked(value))
            else:
                require(type(value) is declared, f"{name} must be a table, got {shown(value)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        values: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return values


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a settings dataclass; `Setting` explains the arguments."""
    limits = {"least": least, "above": above, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata={"meaning": meaning, **limits})


def settings_of(cls: type, table: str = "") -> dict[str, Setting]:
    """Map full names to the settings of a dataclass and of its nested tables."""
    settings: dict[str, Setting] = {}
    for name, declared in _declared(cls).items():
        full = f"{table}.{name}" if table else name
        if isinstance(declared, Setting):
            settings[full] = dataclasses.replace(declared, name=full)
        else:
            settings |= settings_of(declared, full)
    return settings


def require(ok: bool, message: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(message)


@cache
def _declared(cls: Any) -> dict[str, Setting | type]:
    declared, hints = dict[str, Setting | type](), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        is_list = get_origin(kinds[0]) is tuple
        if dataclasses.is_dataclass(hint):
            declared[field.name] = hint  # type: ignore[assignment]  # a class
            continue
        declared[field.name] = Setting(
            name=field.name, kind=get_args(kinds[0])[0] if is_list else kinds[0], is_list=is_list,
            optional=NoneType in kinds, default=field.default, **field.metadata,
        )  # fmt: skip
    return declared
