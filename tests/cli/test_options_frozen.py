"""The options of every command: a new knob is a setting, unless people change it from run to run."""

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_cli.settings.tables import SETTINGS

LINES = 120  # two screens of 60 lines

GENERATE = """
    --prompt-file --batch --max-batch --chat --max-new-tokens --compare --model --dtype --device
    --kv-device-budget --trust-remote-code --policy --preset --config --set --budget --recent --trigger
    --t-max --lossless --draft-max --temperature --top-p --seed --trace --audit --json --quiet
    --output --force --resume
"""
OPTIONS = {
    "generate": GENERATE,
    "serve": """
        --model --policy --preset --config --set --budget --recent --trigger --t-max --slots --host --port
        --trace --audit
    """,
    "eval": """
        --method --share --budget --recent --task --list-tasks --length --samples --seed --fidelity --tokens
        --model --dtype --device --kv-device-budget --trust-remote-code --set
        --output --resume --plot --force --wide --json --quiet
    """,
    "bench": """
        --policy --context --batch --baseline --steps --repeats --time-limit --slow-rate --ragged
        --acceptance --seed --threads --forecast --model --random-weights --dtype --device
        --kv-device-budget --trust-remote-code --preset --config --set --budget --plot --output --force --wide
        --json --quiet
    """,
    "kernel-bench": """
        --context --batch --heads --kv-heads --head-dim --dtype --retention --op --sweep --repeats --seed
        --backend --device --compile-only --arch --plot --output --force --wide --json --quiet
    """,
    "tune": """
        --trigger-policy --trigger-set --t-max --budget --search --min-retained --max-read
        --trials --seed --confirm --model --dtype --device
        --trust-remote-code --set --output --plot --force --wide --json --quiet
    """,
    "tune heads": """
        --prompt-file --length --parts --clusters --top-k --model --dtype --device --trust-remote-code --set
        --output --force --json --quiet
    """,
    "lm-eval": "",
    "doctor": "--model --json",
    "config list": "--json",
    "config show": "--preset --config --set --json",
    "trace check": "--json",
    "trace diff": "--request --fail-if --json --output --force",
    "trace export": "--format --table --output --force --quiet",
    "trace import": """
        --output --top --kv-heads --tokenizer --trigger --force --json --quiet
    """,
    "trace plot": "--kind --request --layer --head --format --output --force",
    "trace record": GENERATE.replace("--trace", "--report").replace("--compare", "").replace("--resume", ""),
    "trace replay": """
        --trigger-policy --trigger --trigger-set --t-max --refresh-every --budget --set --request --layers
        --heads --against --play --output --force --wide --json --quiet
    """,
    "trace report": "--request --output --force",
    "trace show": "--request --layer --step --head --full --wide --json --output --force",
    "trace sql": "--format --json --output --force",
}


def options_of(command, name: str = "") -> dict[str, set[str]]:
    """List the options of a command's commands, by their words after `sfi`."""
    if not hasattr(command, "commands"):
        return {
            name: {
                parameter.opts[0]
                for parameter in command.params
                if parameter.param_type_name == "option" and parameter.name != "help"
            }
        }
    found = {}
    for word, inner in command.commands.items():
        found |= options_of(inner, f"{name} {word}".strip())
    return found


def test_the_options_of_every_command_are_these():
    found = options_of(typer.main.get_command(cli.app))
    assert found == {name: set(options.split()) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_fits_two_screens_and_its_examples_use_options_that_exist(command: str):
    words = [*command.split(), "--help"]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert result.stdout.count("\n") <= LINES
    text = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"}).stdout
    for example in re.findall(r"^\s*(sfi .*?)\s*$", text, re.MULTILINE):
        options = [word for word in shlex.split(example)[1:] if word.startswith("-")]
        assert all(option in text for option in options), example


def test_nothing_but_the_command_line_runs_a_checkpoint_s_code():
    """A config file may come from somebody else."""
    assert not [name for name in SETTINGS if "trust" in name or "remote" in name]
