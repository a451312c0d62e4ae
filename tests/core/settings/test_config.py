"""Settings: presets, TOML and JSON round trips, what a setting says of itself, and one line for every mistake."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.config import PRESETS, SelectorConfig, SfiConfig
from sfi_core.settings.engine import DeviceBudget
from sfi_core.settings.fields import Table, setting, settings_of

# what the paper leaves open is the released code's value in every preset
OPEN = {"alpha": 0.5, "gamma": 0.5, "power": 1.8, "eta": 0.4, "radius": 16, "temperature": 2.0}
PAPER_SELECTOR = OPEN | {"lambda_clip": 0.02, "alpha_soft": 0.5, "alpha_cross": 0.35}
PAPER_SELECTOR |= {"beta": pytest.approx(-math.log(0.6) / 0.9)}
PAPER = {"sink": 4, "recent": 256, "recent_mode": "sliding", "budget": 2048}
PAPER |= {"page_size": 1, "t_max": 64, "min_gap": 0, "trigger_delay": 0, "slow_start": 1, "span": 0}
PAPER |= {"trigger_policy": "boundary", "triggers": (".", "?", "!", ";", "\n")}
PAPER |= {"trigger_token_ids": None, "window_prefill": 16, "dense_layers": ()}
DEFAULT = {"recent_mode": "anchored", "min_gap": 4, "trigger_delay": 1, "slow_start": 2, "span": 10}
RELEASED = {"budget": 1568, "min_gap": 16, "trigger_delay": 1, "triggers": (".", "?", "!")}
RELEASED |= {"lambda_clip": 0.25, "alpha_soft": 1.0, "alpha_cross": 0.85, "eta": pytest.approx(0.28)}
RELEASED |= {"beta": pytest.approx(-0.7 * math.log(0.6) / 0.9)}  # Eq. 11 to the power of 0.7

# what triggers other than the paper's look at
ALTERNATIVES = {"stride", "random_rate", "trigger_seed"}


def mistake(error: type[Exception], message: str):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def flat(config: SfiConfig) -> dict[str, object]:
    values = config.to_dict()
    return {**values.pop("selector"), **values.pop("baseline"), **values}


# of policies of their own; the presets of SFI leave them alone
METHODS = {"codescan", "draft", "freekv", "synckv"}


@pytest.mark.parametrize(("preset", "changes"), [("paper", {}), ("default", DEFAULT), ("released", RELEASED)])
def test_a_preset_has_its_documented_values(preset: str, changes: dict):
    """Scripts that name a preset rely on these numbers."""
    values = flat(SfiConfig.preset(preset))
    wanted = PAPER | PAPER_SELECTOR | changes
    assert {name: values[name] for name in wanted} == wanted
    assert set(values) - set(wanted) == {"page", *ALTERNATIVES, *METHODS}


@pytest.mark.parametrize(
    ("preset", "kept", "tau"), [("freekv-long-input", 128, 0.8), ("freekv-long-generation", 512, 0.9)]
)
def test_freekv_s_scenarios_have_a_budget_of_2048_tokens(preset: str, kept: int, tau: float):
    """FreeKV, Sec. 5.1: B = 2048, S and W of 128 or 512, tau of 0.8 or 0.9, pages of 32."""
    config = SfiConfig.preset(preset)
    assert (config.sink, config.recent) == (kept, kept)
    assert config.sink + config.recent + config.budget == 2048
    assert (config.freekv.tau, config.freekv.page, config.budget % 32) == (tau, 32, 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_config_survives_toml_and_json(preset: str, tmp_path: Path):
    path = tmp_path / "settings.toml"
    config = SfiConfig.preset(preset)
    path.write_text(config.to_toml(), encoding="utf-8")
    assert SfiConfig().merge_toml(path) == config
    assert SfiConfig().replace(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("trigger", ['"', "\\", "\n\t\r", "。", "😀", "\x7f", "\x00", "\u2028", "é"])
def test_every_trigger_survives_toml(trigger: str, tmp_path: Path):
    path = tmp_path / "settings.toml"
    config = SfiConfig(triggers=(trigger, "."), trigger_token_ids=(3, 1), dense_layers=(0, 2))
    path.write_text(config.to_toml(), encoding="utf-8", newline="")
    assert SfiConfig().merge_toml(path) == config


def test_a_file_changes_only_what_it_names(tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text("budget = 7\n[selector]\nalpha = 1\n[provenance]\ntrial = 3\n")
    base = SfiConfig.preset("released")
    merged = base.merge_toml(path)
    assert merged == base.replace(budget=7, selector={"alpha": 1.0})
    assert merged.selector.lambda_clip == 0.25


def test_lists_become_tuples_so_that_a_config_can_be_hashed():
    config = SfiConfig().replace(triggers=["."], trigger_token_ids=[1, 2], dense_layers=[0])
    assert (config.triggers, config.trigger_token_ids) == ((".",), (1, 2))
    assert hash(config) == hash(SfiConfig(triggers=(".",), trigger_token_ids=(1, 2), dense_layers=(0,)))


def test_an_unknown_preset_is_named_with_the_known_ones():
    with mistake(ConfigError, f"unknown preset 'papr'; did you mean 'paper'? expected one of {tuple(PRESETS)}"):
        SfiConfig.preset("papr")


WRONG = [
    ("budget", 0, "budget must be positive, got 0"),
    ("sink", -1, "sink must be at least 0, got -1"),
    ("slow_start", 0, "slow_start must be at least 1, got 0"),
    ("dense_layers", (-1,), "dense_layers must be at least 0 each, got [-1]"),
    ("recent_mode", "x", "unknown recent_mode 'x'; expected one of ('anchored', 'sliding')"),
    ("budget", 2.0, "budget must be int, got 2.0"),
    ("triggers", ".", "triggers must be a list of str, got '.'"),
    ("trigger_token_ids", [True], "trigger_token_ids must be a list of int, got [True]"),
    ("selector", 3, "selector must be a table, got 3"),
    ("random_rate", math.nan, "random_rate must be in [0, 1], got nan"),
]
WRONG_IN_TABLES = [
    ("selector", "alpha", 0.0, "alpha must be in (0, 1], got 0.0"),
    ("selector", "alpha", "1", "alpha must be float, got '1'"),
    ("selector", "beta", math.inf, "beta must be at least 0 and finite, got inf"),
    ("selector", "temperature", 0.0, "temperature must be positive, got 0.0"),
    ("selector", "lambda_clip", 1.5, "lambda_clip must be in [0, 1], got 1.5"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_setting_is_refused_however_it_comes(name: str, value: object, message: str):
    with mistake(ConfigError, message):
        SfiConfig().replace(**{name: value})
    with mistake(ConfigError, message):
        SfiConfig(**{name: value})


@pytest.mark.parametrize(("table", "name", "value", "message"), WRONG_IN_TABLES)
def test_a_wrong_setting_of_a_table_is_refused(table: str, name: str, value: object, message: str):
    with mistake(ConfigError, message):
        SfiConfig().replace(**{table: {name: value}})


def test_a_wrong_setting_in_a_file_is_named_with_the_file(tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text("budget = true\n")
    with mistake(ConfigError, f"{path}: budget must be int, got True"):
        SfiConfig().merge_toml(path)


@pytest.mark.parametrize(("text", "line"), [("budget 3\n", 1), ("budget = 3\n\nsink = \n", 3), ("[selector\n", 1)])
def test_malformed_toml_is_named_with_file_and_line(text: str, line: int, tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        SfiConfig().merge_toml(path)
    assert str(caught.value).startswith(f"config {path} is not valid TOML: ")
    assert f"(at line {line}, " in str(caught.value)


def test_a_config_error_is_a_usage_error():
    assert ConfigError.exit_code == 2
    assert InputError.exit_code == 3
    assert issubclass(ConfigError, ValueError)


def test_toml_is_read_back_as_it_was_written():
    config = SfiConfig.preset("released").replace(budget=7, triggers=("\x7f", "\u2028"), synckv={"stride": 3})
    assert SfiConfig.from_toml(config.to_toml()) == config
    assert SfiConfig.from_toml("budget = 7\n[provenance]\nx = 1\n") == SfiConfig(budget=7)
    with pytest.raises(ConfigError, match="config text is not valid TOML: "):
        SfiConfig.from_toml("budget")
    with pytest.raises(ConfigError, match="budget must be positive, got 0"):
        SfiConfig.from_toml("budget = 0")


def test_an_unknown_name_is_one_line_with_the_nearest():
    unknown = "unknown setting 'budgt'; did you mean budget?"
    for make in (SfiConfig, SfiConfig().replace, lambda budgt: SfiConfig.from_toml(f"budgt = {budgt}")):
        with mistake(ConfigError, unknown):
            make(budgt=3)
    with mistake(ConfigError, "unknown setting 'alfa'; did you mean alpha?"):
        SfiConfig().replace(selector={"alfa": 1.0})
    with mistake(ConfigError, "unknown setting 'alfa'; did you mean alpha?"):
        SelectorConfig(alfa=1.0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("20%", 200_000_000_000), ("0.5%", 5_000_000_000), ("100%", 1_000_000_000_000), ("2GiB", 2 * 1024**3),
        ("0.5GiB", 1024**3 // 2), ("500MB", 500_000_000), ("1.5 kB", 1500), ("3KiB", 3072), ("7MiB", 7 * 1024**2),
        ("2TiB", 2 * 1024**4), ("2tb", 2 * 10**12), ("1GB", 10**9), ("1073741824", 1024**3),
    ],
)  # fmt: skip
def test_a_share_is_of_the_cache_and_a_size_is_bytes(text: str, wanted: int):
    budget = DeviceBudget.parse(text)
    assert budget.bytes_of(10**12) == wanted


def test_a_share_is_exact_and_rounds_down():
    assert DeviceBudget.parse("1.1%").bytes_of(10**18) == 11 * 10**15
    assert DeviceBudget.parse("50%").bytes_of(7) == 3


@pytest.mark.parametrize(
    "text", ["x", "", "0%", "101%", "-5%", "2 gigabytes", "0GiB", "1.5", "2Gi", "1e9", "nan%", "%"]
)
def test_anything_else_is_refused_in_one_line(text: str):
    with pytest.raises(ConfigError) as caught:
        DeviceBudget.parse(text)
    assert str(caught.value) == (f"kv_device_budget must be a share such as 20% or a size such as 2GiB, got {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    share: float = setting(0.5, "A share. More of it.", above=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Table):
    count: int = setting(3, "How many.", least=1)
    rate: float = setting(1.0, "How fast; 0 is not", above=0)
    mode: str = setting("on", "Which.", choices=("on", "off"))
    ids: tuple[int, ...] | None = setting(None, "Some.", least=0)
    free: int = setting(0, "Anything.")
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("name", "type_", "range_", "brief"),
    [
        ("count", "int", "at least 1", "How many."),
        ("rate", "float", "positive", "How fast; 0 is not."),
        ("mode", "str", "on, off", "Which."),
        ("ids", "list of int or none", "at least 0", "Some."),
        ("free", "int", "", "Anything."),
        ("inner.share", "float", "in (0, 1]", "A share."),
    ],
)
def test_a_setting_describes_itself(name: str, type_: str, range_: str, brief: str):
    setting = settings_of(Made)[name]
    assert (setting.name, setting.type, setting.range, setting.brief) == (name, type_, range_, brief)


def test_settings_of_a_table_have_its_name():
    assert list(settings_of(Made, "made"))[-1] == "made.inner.share"
    assert settings_of(Made)["count"].default == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", 0, "count must be at least 1, got 0"),
        ("count", True, "count must be int, got True"),
        ("rate", 0, "rate must be positive, got 0.0"),
        ("rate", math.inf, "rate must be positive and finite, got inf"),
        ("mode", "of", "unknown mode 'of'; expected one of ('on', 'off')"),
        ("count", 10**400, "count must be at most 9,007,199,254,740,992, got 1" + "0" * 199 + "..."),
        ("rate", 10**400, "rate must be float, got 1" + "0" * 199 + "..."),
        ("ids", [2, 10**5000], "ids must be at most 9,007,199,254,740,992 each, got list too long to show"),
        ("ids", [2, -1], "ids must be at least 0 each, got [2, -1]"),
        ("ids", 2, "ids must be a list of int, got 2"),
        ("inner", 2, "inner must be a table, got 2"),
    ],
)
def test_a_value_is_refused_by_type_and_range(name: str, value: object, words: str):
    with pytest.raises(ConfigError) as caught:
        Made(**{name: value})
    assert str(caught.value) == words


def test_a_list_becomes_a_tuple_and_a_whole_number_a_float():
    config = Made(ids=[1, 2], rate=2)
    assert (config.ids, config.rate, type(config.rate)) == ((1, 2), 2.0, float)


def test_a_field_without_a_meaning_is_a_mistake_of_ours():
    @dataclass
    class Silent:
        count: int = 3

    with pytest.raises(TypeError, match="meaning"):
        settings_of(Silent)
