"""A method under evaluation: a policy, a preset, the settings that differ from the preset, and a size."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import ConfigError
from sfi_core.policies import policy_class
from sfi_core.settings.config import SfiConfig

WHOLE = "full-kv"  # full attention, to which sizes do not apply
EVERYTHING, OWN = "all", "own"  # labels of full attention's size, and of a method's own size
RECENT = 128  # default tokens of the recent window
FILE = ".toml"  # ending of a preset that is a file of settings
WRITTEN = re.compile(
    r"(?:(?P<label>[^=:]+)=)?(?P<policy>[^@:=]+)(?:@(?P<preset>[^:=]+))?(?::(?P<settings>.+))?", re.DOTALL
)
KEY = re.compile(r"\s*([\w.]+)\s*=\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A policy with its settings, at a size: how much a fast step may read."""

    label: str
    policy: str
    preset: str  # the preset that the settings start from
    settings: Mapping[str, Any]  # differences from the preset, as `SfiConfig.replace` takes them
    config: SfiConfig  # the preset with these settings, without the size
    share: float | None = None  # sink, selected and recent tokens over the tokens of the prompt. In (0, 1]
    # selected tokens of a KV head. Without `share` and `budget` the method has a size of its own
    budget: int | None = None
    recent: int = RECENT  # tokens of the recent window; with a share, its most tokens

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[LABEL=]POLICY[@PRESET][:key=value,...]`; values are JSON or bare words. The size is its own.

        A preset that ends in `.toml` is a file of settings, such as `sfi tune` writes, and keeps its sizes.

        Raises:
            ConfigError: `text` has another form, or a policy, preset or setting does not exist.
            InputError: The preset's file cannot be read.
        """
        match = WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"method must be POLICY[@PRESET][:key=value,...], got {text!r}")
        policy, preset = match["policy"], match["preset"] or "default"
        try:
            policy_class(policy)
            settings = _settings(match["settings"] or "")
            config = preset_config(preset).replace(**settings)
        except ConfigError as error:
            raise ConfigError(f"method {text}: {error}") from error
        label = match["label"] or text.strip()
        return cls(label=label, policy=policy, preset=preset, settings=settings, config=config)

    @property
    def size(self) -> str:
        """A short name of the size for tables."""
        return _size(self.share, self.budget) or (EVERYTHING if self.policy == WHOLE else OWN)

    @property
    def key(self) -> tuple[str, str]:
        """Label and size, unique in an evaluation."""
        return self.label, self.size

    @property
    def sized(self) -> bool:
        """Whether an evaluation sets the size; not of full attention, nor of a method that states its budget."""
        return self.policy != WHOLE and not self.preset.endswith(FILE) and "budget" not in self.settings

    def config_for(self, context: int) -> SfiConfig:
        """Return the settings for a prompt of `context` tokens; raise `ConfigError` if none is selected."""
        if self.share is None and self.budget is None:
            return self.config
        config = self.config if "recent" in self.settings else self.config.replace(recent=self.recent)
        if self.share is None:
            return config.replace(budget=self.budget)
        return at_share(config, context, self.share)

    def columns(self, context: int) -> dict[str, Any]:
        """Return the columns of the method in the rows of results."""
        config, whole = self.config_for(context), self.policy == WHOLE
        return {
            "method": self.label,
            "policy": self.policy,
            "preset": self.preset,
            "settings": dict(self.settings),
            "size": self.size,
            "share": self.share,
            "budget": None if whole else config.budget,
            "recent": None if whole else config.recent,
        }


def at_sizes(
    methods: Sequence[Method],
    *,
    shares: Sequence[float] | None = None,
    budgets: Sequence[int] | None = None,
    recent: int = RECENT,
) -> list[Method]:
    """Return every method at every size, by method; a method with a size of its own comes once.

    Sizes are `budgets`, or without them `shares`; see `Method`. Raise `ConfigError` for one out of range, for none, and
    for a size or a method's label that comes twice.
    """
    for share in shares or ():
        if not 0 < share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {share:g}")
    for name, values in (("budget", budgets or ()), ("recent", (recent,))):
        if values and min(values) < 1:
            raise ConfigError(f"{name} must be positive, got {min(values)}")
    check_distinct("method", [method.label for method in methods])
    pairs: list[tuple[float | None, int | None]]
    pairs = [(share, None) for share in shares or ()] if budgets is None else [(None, budget) for budget in budgets]
    check_distinct("size", [_size(*pair) for pair in pairs])
    return [
        replace(method, share=share, budget=budget, recent=recent) if method.sized else method
        for method in methods
        for share, budget in (pairs if method.sized else pairs[:1])
    ]


def _size(share: float | None, budget: int | None) -> str:
    if share is not None:
        return f"{100 * share:g}%"
    return "" if budget is None else f"K {budget}"


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise `ConfigError` if there is no value, or a value twice."""
    if not values:
        raise ConfigError(f"{name} must be given at least once, got none")
    if len(set(values)) < len(values):
        raise ConfigError(f"each {name} must differ, got {', '.join(map(str, values))}")


def at_share(config: SfiConfig, context: int, share: float) -> SfiConfig:
    """Set recent and selected tokens so that they and the sink are a share of the context.

    The recent window takes `config.recent` tokens, but at most half of the share; the selected tokens take the rest.
    So every method reads the same number of tokens in a fast step. Raise `ConfigError` if no token is left to select.
    """
    total = int(share * context)
    recent = min(config.recent, total // 2)
    budget = total - recent - config.sink
    if recent < 1 or budget < 1:
        raise ConfigError(
            f"share must leave a selected token beside a sink of {config.sink}, got {share:g} of {context} tokens"
        )
    return config.replace(budget=budget, recent=recent)


def preset_config(preset: str) -> SfiConfig:
    """Return a preset's or TOML file's settings; raise `ConfigError` or `InputError` if there are none."""
    if preset.endswith(FILE):
        return SfiConfig().merge_toml(Path(preset))
    return SfiConfig.preset(preset)


def _settings(text: str) -> dict[str, Any]:
    # key=value,key=value; TABLE.NAME is a setting of a table such as `selector`
    settings: dict[str, Any] = {}
    at = 0
    while at < len(text):
        match = KEY.match(text, at)
        if match is None:
            raise ConfigError(f"setting must be key=value, got {text[at:]!r}")
        value, at = _value(text, match.end())
        table, _, name = match[1].rpartition(".")
        place = settings.setdefault(table, {}) if table else settings
        if not isinstance(place, dict) or name in place:
            raise ConfigError(f"setting {match[1]} must be given once, got it twice")
        place[name] = value
    return settings


def _value(text: str, start: int) -> tuple[Any, int]:
    # a JSON value, or a bare word up to the next comma; and the start of the next setting
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        end = -1
    if end == len(text) or text[end : end + 1] == ",":
        return value, end + 1
    word, comma, _ = text[start:].partition(",")
    return word.strip(), start + len(word) + len(comma)
