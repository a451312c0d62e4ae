"""Settings: presets, TOML and JSON round trips, and one line for every mistake."""

import ast
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.config import PRESETS, TRIGGER_POLICIES, SfiConfig
from sfi_core.settings.parts import SelectorConfig

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
    assert set(values) - set(wanted) == {"page", "score", *ALTERNATIVES, *METHODS}


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


def test_replacing_part_of_the_selector_keeps_the_rest():
    config = SfiConfig.preset("released").replace(selector={"alpha": 0.25})
    assert config.selector == dataclasses.replace(SfiConfig.preset("released").selector, alpha=0.25)


def test_lists_become_tuples_so_that_a_config_can_be_hashed():
    config = SfiConfig().replace(triggers=["."], trigger_token_ids=[1, 2], dense_layers=[0])
    assert (config.triggers, config.trigger_token_ids) == ((".",), (1, 2))
    assert hash(config) == hash(SfiConfig(triggers=(".",), trigger_token_ids=(1, 2), dense_layers=(0,)))


@pytest.mark.parametrize("name", ["self", "alpha"])
def test_an_unknown_setting_is_named_with_the_known_ones(name: str):
    with pytest.raises(ConfigError, match=rf"^unknown setting '{name}'; expected one of ") as caught:
        SfiConfig().replace(**{name: 3})
    names = ast.literal_eval(str(caught.value).split("expected one of ")[1])
    assert set(names) == {*PAPER, *ALTERNATIVES, *METHODS, "selector", "baseline"}


def test_an_unknown_selector_setting_is_named_with_the_selector_s():
    with pytest.raises(ConfigError, match=r"^unknown setting 'sink'; expected one of \('alpha', "):
        SfiConfig().replace(selector={"sink": 3})


def test_an_unknown_preset_is_named_with_the_known_ones():
    with mistake(ConfigError, f"unknown preset 'papr'; did you mean 'paper'? expected one of {tuple(PRESETS)}"):
        SfiConfig.preset("papr")


WRONG = [
    ("budget", 0, "budget must be positive, got 0"),
    ("recent", 0, "recent must be positive, got 0"),
    ("sink", -1, "sink must be at least 0, got -1"),
    ("t_max", -1, "t_max must be at least 0, got -1"),
    ("min_gap", -1, "min_gap must be at least 0, got -1"),
    ("trigger_delay", -1, "trigger_delay must be at least 0, got -1"),
    ("span", -1, "span must be at least 0, got -1"),
    ("stride", 0, "stride must be at least 1, got 0"),
    ("slow_start", 0, "slow_start must be at least 1, got 0"),
    ("window_prefill", 0, "window_prefill must be at least 1, got 0"),
    ("dense_layers", (-1,), "dense_layers must be at least 0 each, got [-1]"),
    ("trigger_token_ids", (3, -1), "trigger_token_ids must be at least 0 each, got [3, -1]"),
    ("recent_mode", "x", "unknown recent_mode 'x'; expected one of ('anchored', 'sliding')"),
    ("trigger_policy", "x", f"unknown trigger_policy 'x'; expected one of {TRIGGER_POLICIES}"),
    ("budget", 2.0, "budget must be int, got 2.0"),
    ("triggers", ".", "triggers must be a list of str, got '.'"),
    ("trigger_token_ids", [True], "trigger_token_ids must be a list of int, got [True]"),
    ("selector", 3, "selector must be a table, got 3"),
    ("random_rate", -0.1, "random_rate must be in [0, 1], got -0.1"),
    ("random_rate", math.nan, "random_rate must be in [0, 1], got nan"),
]
WRONG_IN_TABLES = [
    ("baseline", "page", 0, "page must be at least 1, got 0"),
    ("selector", "alpha", 0.0, "alpha must be in (0, 1], got 0.0"),
    ("selector", "alpha", 1.1, "alpha must be in (0, 1], got 1.1"),
    ("selector", "alpha", math.nan, "alpha must be in (0, 1], got nan"),
    ("selector", "alpha", "1", "alpha must be float, got '1'"),
    ("selector", "gamma", -0.1, "gamma must be at least 0, got -0.1"),
    ("selector", "beta", math.inf, "beta must be at least 0 and finite, got inf"),
    ("selector", "power", 0.9, "power must be at least 1, got 0.9"),
    ("selector", "eta", -1.0, "eta must be at least 0, got -1.0"),
    ("selector", "alpha_soft", -1.0, "alpha_soft must be at least 0, got -1.0"),
    ("selector", "alpha_cross", math.nan, "alpha_cross must be at least 0 and finite, got nan"),
    ("selector", "radius", -1, "radius must be at least 0, got -1"),
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
