"""A method under evaluation: a policy, a preset, and the settings that differ from the preset."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.lossless import check_drafts
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.policies import policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions
from sfi_core.triggers.trigger_set import resolve_triggers

WHOLE = "full-kv"  # full attention, to which sizes do not apply
EVERYTHING, OWN = "all", "own"  # labels of full attention's size, and of a method's own size
RECENT = 128  # default tokens of the recent window
FILE = ".toml"  # ending of a preset that is a file of settings
LOSSLESS = "lossless"  # a setting of the method, not of `SfiConfig`
WRITTEN = re.compile(
    r"(?:(?P<label>[^=:]+)=)?(?P<policy>[^@:=]+)(?:@(?P<preset>[^:=]+))?(?::(?P<settings>.+))?", re.DOTALL
)
KEY = re.compile(r"\s*([\w.]+)\s*=\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A policy and its settings, without sizes.

    Attributes:
        preset: The preset that the settings start from.
        settings: Differences from the preset, as `SfiConfig.replace` takes them, and `lossless`.
        config: The preset with these settings.
        sized: Whether the evaluation sets the sizes; not for full attention, nor for a method that states its budget.
        lossless: Whether fast steps only draft, so that the tokens are full attention's.
    """

    label: str
    policy: str
    preset: str
    settings: Mapping[str, Any]
    config: SfiConfig
    sized: bool
    lossless: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `[LABEL=]POLICY[@PRESET][:key=value,...]`; values are JSON or bare words.

        A preset that ends in `.toml` is a file of settings, such as `sfi tune` writes, and keeps its sizes.
        The setting `lossless=true` makes a lossless run of the policy.

        Raises:
            ConfigError: `text` has another form; a policy, preset or setting does not exist; or a policy
                cannot draft for a lossless run.
            InputError: The preset's file cannot be read.
        """
        match = WRITTEN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"method must be POLICY[@PRESET][:key=value,...], got {text!r}")
        policy, preset = match["policy"], match["preset"] or "default"
        try:
            policy_class(policy)
            settings = _settings(match["settings"] or "")
            lossless = _lossless(policy, settings)
            config = preset_config(preset).replace(**{name: one for name, one in settings.items() if name != LOSSLESS})
        except ConfigError as error:
            raise ConfigError(f"method {text}: {error}") from error
        return cls(
            label=match["label"] or text.strip(),
            policy=policy,
            preset=preset,
            settings=settings,
            config=config,
            sized=policy != WHOLE and not preset.endswith(FILE) and "budget" not in settings,
            lossless=lossless,
        )

    def resolved(self, tokenizer: Any) -> "Method":
        """Return the method with its triggers as token ids; raise `ConfigError` if no trigger is a token."""
        ids = resolve_triggers(tokenizer, self.config)
        return replace(self, config=self.config.replace(trigger_token_ids=ids))

    def engine(self, engine: EngineOptions) -> EngineOptions:
        """Return the method's engine options: without the device budget if the method cannot offload."""
        if not self.lossless:
            return engine_for(self.policy, engine)
        return replace(engine, lossless=True, kv_device_budget=None)

    def variants(self, sizes: Sequence["Size"]) -> list["MethodVariant"]:
        """Combine the method with sizes; a method with its own size is one variant."""
        return [MethodVariant(self, size) for size in (sizes if self.sized else (None,))]


@dataclass(frozen=True, slots=True)
class MethodVariant:
    """A method at a size; None for the method's own size."""

    method: Method
    size: "Size | None"

    @property
    def key(self) -> tuple[str, str]:
        """The labels of method and size, unique in a grid."""
        if self.size is not None:
            return self.method.label, self.size.label
        return self.method.label, EVERYTHING if self.method.policy == WHOLE else OWN

    def config(self, context: int) -> SfiConfig:
        """Return the settings for a prompt of `context` tokens; raise `ConfigError` if none is selected."""
        size, config = self.size, self.method.config
        if size is None:
            return config
        recent = config.recent if "recent" in self.method.settings else size.recent
        if size.share is None:
            return config.replace(budget=size.budget, recent=recent)
        return at_share(config.replace(recent=recent), context, size.share)

    def columns(self, context: int) -> dict[str, Any]:
        """Return the columns of the variant in the rows of results."""
        method, size, config = self.method, self.size, self.config(context)
        whole = method.policy == WHOLE
        return {
            "method": method.label,
            "policy": method.policy,
            "preset": method.preset,
            "settings": dict(method.settings),
            "size": self.key[1],
            "share": None if size is None else size.share,
            "budget": None if whole else config.budget,
            "recent": None if whole else config.recent,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much a fast step may read: a share of the context, or a number of selected tokens.

    Attributes:
        share: Sink, selected and recent tokens over the tokens of the prompt. In (0, 1].
        budget: Selected tokens of a KV head; None with a share.
        recent: Tokens of the recent window; with a share, its most tokens.
    """

    share: float | None = None
    budget: int | None = None
    recent: int = RECENT

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless one of share and budget is given, and in range."""
        if (self.share is None) == (self.budget is None):
            raise ConfigError(f"size must be a share or a budget, got {self.share} and {self.budget}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"share must be in (0, 1], got {self.share:g}")
        for name in ("budget", "recent"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive, got {value}")

    @property
    def label(self) -> str:
        """A short name for tables."""
        return f"{100 * self.share:g}%" if self.share else f"K {self.budget}"


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


def _lossless(policy: str, settings: Mapping[str, Any]) -> bool:
    wanted = settings.get(LOSSLESS, False)
    if not isinstance(wanted, bool):
        raise ConfigError(f"{LOSSLESS} must be true or false, got {wanted!r}")
    if wanted:
        check_drafts(policy_class(policy), policy)
    return wanted


def preset_config(preset: str) -> SfiConfig:
    """Return a preset's or TOML file's settings; raise `ConfigError` or `InputError` if there are none."""
    if preset.endswith(FILE):
        return SfiConfig().merge_toml(Path(preset))
    return SfiConfig.preset(preset)


def _settings(text: str) -> dict[str, Any]:
    # key=value,key=value; TABLE.NAME is a setting of a table such as `selector`
    found: dict[str, Any] = {}
    at = 0
    while at < len(text):
        match = KEY.match(text, at)
        if match is None:
            raise ConfigError(f"setting must be key=value, got {text[at:]!r}")
        value, at = _value(text, match.end())
        table, _, name = match[1].rpartition(".")
        place = found.setdefault(table, {}) if table else found
        if not isinstance(place, dict) or name in place:
            raise ConfigError(f"setting {match[1]} must be given once, got it twice")
        place[name] = value
    return found


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
