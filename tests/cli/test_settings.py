"""The command line as a whole; `--set`, `--config`, and `sfi config list`."""

import json
import signal
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_cli.__main__ import main
from sfi_cli.settings import COMMANDS, SETTINGS, TABLES, TraceTable, given, settings_for, value_of, written
from sfi_core import AuditConfig, EngineOptions, Sampling, SfiConfig
from sfi_core.errors import ConfigError, InputError, SfiError
from sfi_core.measure.doctor import _prompts, checks
from tests.cli.trace_commands import sfi


def message(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert isinstance(result.exception, SfiError), result.output
    assert (result.exception.exit_code, result.stdout) == (2, "")
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("t_max=32", 32), (" t_max = 32 ", 32), ("recent_mode=sliding", "sliding"),
        ('recent_mode="sliding"', "sliding"), ('triggers=[".", "\\n"]', (".", "\n")),
        ("dense_layers=0,3,8-11", (0, 3, 8, 9, 10, 11)), ("dense_layers=[2, 1]", (2, 1)), ("dense_layers=[]", ()),
        ("trigger_token_ids=none", None), ("freekv.tau=-1", -1.0), ("selector.alpha=0.7", 0.7),
        ("baseline.page=8", 8),
    ],
)  # fmt: skip
def test_set_reads_values_by_the_setting_s_type(text: str, value: object):
    config = given("generate", sets=[text]).config
    table, _, name = text.partition("=")[0].strip().rpartition(".")
    setting = getattr(getattr(config, table) if table else config, name)
    assert (setting, type(setting)) == (value, type(value))


def test_tables_around_the_config_are_set_too():
    settings = given(
        "generate",
        sets=["engine.overlap=false", "engine.prefill_chunk=7", "trace.spans=true", "sampling.top_k=5"],
        options={"audit.every": 4, "sampling.temperature": None},
    )
    engine = settings.table(EngineOptions)
    assert (engine.overlap, engine.graphs, engine.prefill_chunk) == (False, None, 7)
    assert settings.table(TraceTable) == TraceTable(spans=True)
    assert settings.table(AuditConfig) == AuditConfig(every=4)
    assert settings.of("sampling") == {"top_k": 5}
    assert settings.config == SfiConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t_max", "a setting must be NAME=VALUE, got 't_max'"),
        ("t-max=4", "unknown setting 't-max'; did you mean t_max?"),
        ("alpha=0.7", "unknown setting 'alpha'; did you mean selector.alpha?"),
        ("qqq=1", "unknown setting 'qqq'; sfi config list has all"),
        ("warm_up=1", "unknown setting 'warm_up'; "),
        ("bench.warm_up=1", "bench.warm_up has no effect here, only on sfi bench"),
        ("t_max=many", "t_max must be int, got 'many'"),
        ("t_max=none", "t_max must be int, got 'none'"),
        ("t_max=1\nsink=2", "t_max must be int, got '1\\nsink=2'"),
        ("t_max=-1", "t_max must be at least 0, got -1"),
        ("recent_mode=x", "unknown recent_mode 'x'; expected one of ('anchored', 'sliding')"),
        ("engine.overlap=yes", "engine.overlap must be true or false, got 'yes'"),
        ("engine.backend=cuda", "unknown engine.backend 'cuda'; expected one of ('auto', 'torch', 'triton')"),
        ("selector.alpha=1.5", "selector.alpha must be in (0, 1], got 1.5"),
        ("audit.layers=1-x", "audit.layers must be numbers and ranges like 0,3,8-11, got 1-x"),
        ("triggers=.", "triggers must be a list of str, got '.'"),
        ("baseline.page=0", "baseline.page must be at least 1, got 0"),
        ("freekv.tau=1.5", "freekv.tau must be in [-1, 1], got 1.5"),
    ],
)
def test_a_wrong_setting_is_one_line(text: str, words: str):
    with pytest.raises(ConfigError) as caught:
        given("generate", sets=[text])
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_as_it_is_shown_can_be_set(name: str):
    default = SETTINGS[name].default
    assert value_of(SETTINGS[name], written(default)) == default


def test_a_preset_yields_to_the_file_and_the_file_to_the_command_line(tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text(
        "span = 3\nbudget = 32\nt_max = 8\n[selector]\nalpha = 0.25\n[engine]\noverlap = false\n"
        "prefill_chunk = 9\n[bench]\nwarm_up = 2\n[provenance]\ntrial = 1\n"
    )
    settings = given(
        "generate", preset="paper", file=file, options={"t_max": 5},
        sets=["budget=16", "budget=48", "engine.prefill_chunk=11"],
    )  # fmt: skip
    wanted = {"span": 3, "budget": 48, "t_max": 5, "selector": {"alpha": 0.25}}
    assert settings.config == SfiConfig.preset("paper").replace(**wanted)
    engine = settings.table(EngineOptions)
    assert (engine.overlap, engine.prefill_chunk) == (False, 11)
    assert settings.said == {"budget", "t_max", "engine.prefill_chunk"}


def test_a_file_s_settings_of_other_commands_have_no_effect(tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text("[engine]\nlossless = true\nfused = false\noverlap = false\n")
    wanted = EngineOptions(overlap=False)
    assert given("bench", file=file).table(EngineOptions) == wanted
    assert given("generate", file=file).table(EngineOptions).lossless


def test_a_setting_of_another_place_says_where_it_has_an_effect():
    words = message("tune", "none", "--set", "slow_start=4")
    assert words.startswith("slow_start has no effect here, only on sfi generate, ")
    assert "sfi tune --search" in words
    for name in ("freekv.tau", "synckv.static"):
        for command in (("tune", "none", "--search"), ("trace", "replay", "none", "--set")):
            words = message(*command, f"{name}=0.5")
            assert words.startswith(f"{name} has no effect here, only on sfi generate, ")
    words = message("tune", "none", "--search", "serve.slots_memory=0.5")
    assert words == "serve.slots_memory has no effect here, only on sfi serve"


@pytest.mark.parametrize("command", ["generate", "bench", "eval", "tune"])
def test_a_device_budget_reaches_the_engine(command: str, tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text('[engine]\nkv_device_budget = "10%"\nkv_page = 16\n')
    option = {"engine.kv_device_budget": "2GiB"}
    engine = given(command, file=file, options=option).table(EngineOptions)
    assert engine == EngineOptions(kv_device_budget="2GiB", kv_page=16)
    said = given(command, sets=["engine.kv_device_budget=20%"], options={}).table(EngineOptions)
    assert said == EngineOptions(kv_device_budget="20%")
    with pytest.raises(ConfigError, match=r"engine\.kv_device_budget must be given once"):
        given(command, sets=["engine.kv_device_budget=20%"], options=option)
    with pytest.raises(ConfigError, match="must be a share such as 20% or a size"):
        given(command, sets=["engine.kv_device_budget=120%"]).table(EngineOptions)


def test_a_setting_and_its_option_do_not_come_together():
    words = message("generate", "x", "--t-max", "3", "--set", "t_max=4")
    assert words == "t_max must be given once, got t_max=... and its own option"
    words = message("tune", "none", "--budget", "3", "--search", "budget=4")
    assert words == "budget must be given once, got budget=... and its own option"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[engine]\noverlap = 3\n", "engine.overlap must be true or false, got 3"),
        ("[engine]\noverlapp = true\n", "unknown setting 'engine.overlapp'; did you mean engine.overlap?"),
        ("[model]\ntrust_remote_code = true\n", "unknown setting 'model.trust_remote_code'; "),
        ("engine = 3\n", "unknown setting 'engine'; "),
        ("[bench]\nwarm_up = -1\n", "bench.warm_up must be at least 0, got -1"),
        ("budgett = 3\n", "unknown setting 'budgett'; did you mean budget?"),
        ("[selector]\nalfa = 1\n", "unknown setting 'selector.alfa'; did you mean selector.alpha"),
        ('budget = "many"\n', "budget must be int, got 'many'"),
        ("[baseline]\npage = 0\n", "baseline.page must be at least 1, got 0"),
    ],
)
def test_a_wrong_table_names_file_and_setting(content: str, words: str, tmp_path: Path):
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        given("generate", file=file)
    assert str(caught.value).startswith(f"{file}: {words}")
    with pytest.raises(InputError):
        given("generate", file=tmp_path / "absent.toml")
    file.write_text("budget = \n")
    with pytest.raises(InputError, match=f"{file} is not valid TOML"):
        given("generate", file=file)


def test_the_list_has_every_field_with_its_default_and_meaning():
    result = CliRunner().invoke(cli.app, ["config", "list", "--json"])
    rows = {row["name"]: row for row in json.loads(result.stdout)["settings"]}
    wanted = {}
    for table, cls in {"": SfiConfig, **TABLES}.items():
        for name, hint in get_type_hints(cls).items():
            inner = [f"{name}.{field.name}" for field in fields(hint)] if is_dataclass(hint) else [name]
            for full in inner:
                value = cls()
                for part in full.split("."):
                    value = getattr(value, part)
                wanted[f"{table}.{full}" if table else full] = value
    assert {name: row["default"] for name, row in rows.items()} == json.loads(json.dumps(wanted))
    for row in rows.values():
        assert row["meaning"].endswith((".", ")")), row
        assert row["type"]
        assert row["commands"], row


def test_the_list_is_a_table_of_what_begins_so():
    result = CliRunner().invoke(cli.app, ["config", "list", "selector"], env={"COLUMNS": "120"})
    lines = [line.split()[0] for line in result.stdout.splitlines() if "selector." in line]
    assert lines == [name for name in SETTINGS if name.startswith("selector.")]
    assert "float, in (0, 1]" in result.stdout
    assert message("config", "list", "x") == "prefix must begin a setting's name, got 'x'"
    assert message("config", "show", "--preset", "x").startswith("unknown preset 'x'")


def test_every_name_that_a_command_takes_exists():
    for command, names in COMMANDS.items():
        assert {name for name in names if name not in SETTINGS} <= set(TABLES), command
    assert set().union(*(settings_for(command) for command in COMMANDS)) == set(SETTINGS)


def test_sampling_begins_with_a_temperature_or_a_limit_on_tokens():
    for greedy in (
        Sampling(),
        Sampling(temperature=0),
        Sampling(temperature=0, top_k=5),
        Sampling(repetition_penalty=2),
    ):
        assert not greedy.do_sample
    for drawn, divisor in ((Sampling(temperature=0.5), 0.5), (Sampling(top_k=5), 1), (Sampling(top_p=0.9), 1)):
        assert (drawn.do_sample, drawn.divisor) == (True, divisor)


def test_all_effective_settings_are_toml_with_their_origin(tmp_path: Path):
    file, whole = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text("budget = 12\nt_max = 8\n[selector]\nalpha = 0.25\n")
    asked = ["--preset", "paper", "--config", str(file), "--set", "budget=16", "--set", "engine.overlap=false"]
    shown = CliRunner().invoke(cli.app, ["config", "show", *asked]).stdout
    for line in (
        "sink = 4  # default", "span = 0  # preset paper", "t_max = 8  # --config", "budget = 16  # --set",
        "alpha = 0.25  # --config", "# trigger_token_ids = none  # default", "overlap = false  # --set",
    ):  # fmt: skip
        assert line in shown.splitlines()
    whole.write_text(shown)
    again, once = given("generate", file=whole), given("generate", preset="paper", file=file, sets=asked[5::2])
    assert again.config == once.config
    assert again.values["engine.overlap"] is once.values["engine.overlap"] is False
    rows = json.loads(CliRunner().invoke(cli.app, ["config", "show", *asked, "--json"]).stdout)["settings"]
    assert [row["name"] for row in rows] == [*SETTINGS]
    assert {"name": "budget", "value": 16, "origin": "--set"} in rows


def test_help_imports_neither_torch_nor_transformers(environment):
    code = (
        "import sys\n"
        "from sfi_cli.app import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)


def test_version_is_printed():
    assert sfi("--version") == (0, "sfi 0.1.0\n", "")


def test_doctor_names_a_dtype_in_which_attention_to_prompts_breaks(monkeypatch):
    def broken(query, *_, **options):
        return query * (torch.nan if query.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr("sfi_core.measure.doctor.scaled_dot_product_attention", broken)
    brain, half = _prompts()
    assert (brain.ok, half.ok) == (False, True)
    assert brain.detail == "PyTorch's attention gives NaN or infinity here; load models in float32"


def test_doctor_tries_the_backends(monkeypatch):
    monkeypatch.setattr("sfi_core.measure.doctor.checks", cache(checks))
    text = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert "backend torch   ok" in text
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    outcomes = {check["name"]: check["ok"] for check in document["checks"]}
    assert result.exit_code == 0
    assert outcomes["backend torch"] is True
    assert outcomes["prompt bfloat16"] is outcomes["prompt float16"] is True
    assert {"machine", "versions", "triggers"} <= set(document)
    assert {row["trigger"] for row in document["triggers"]} == {"'.'", "'?'", "'!'", "';'", r"'\n'"}


class Interrupted:
    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["command line", "arguments", "command", "library"])
def test_ctrl_c_while_loading_is_one_line(monkeypatch, capsys, stage):
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def half_imported(*_: object, **__: object) -> None:
        try:
            interrupted()
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'AutoModel'") from error

    if stage == "command line":
        monkeypatch.setitem(sys.modules, "sfi_cli.app", Interrupted())
    elif stage == "arguments":
        monkeypatch.setattr("typer.core.TyperGroup.make_context", interrupted)
    else:
        ends = interrupted if stage == "command" else half_imported
        monkeypatch.setattr("sfi_core.measure.doctor.checks", ends)
    monkeypatch.setattr(sys, "argv", ["sfi", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_advice_of_the_core_is_spelled_as_options():
    """The rule keeps the setting's name; a setting of a table keeps its own."""
    text = "kv_device_budget must hold 9, got 8; raise kv_device_budget, lower engine.kv_page, contexts or batches"
    assert cli.in_options(text) == (
        "kv_device_budget must hold 9, got 8; raise --kv-device-budget, lower engine.kv_page, --context or --batch"
    )
