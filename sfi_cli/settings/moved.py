"""Options that are settings now, or that people look for, and the command that says so."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from sfi_cli.settings.tables import SETTINGS
from sfi_cli.settings.text import written
from sfi_core.errors import ConfigError


def _moved(names: str, table: str = "", flag: str = "--set") -> dict[str, str]:
    where = f"{table}." if table else ""
    return {f"--{name}": f"{flag} {where}{name.replace('-', '_')}" for name in names.split()}


SWITCHES = {
    "--overlap": "--set engine.overlap=true",
    "--no-overlap": "--set engine.overlap=false",
    "--graphs": "--set engine.graphs=true",
    "--no-graphs": "--set engine.graphs=false",
    "--pack-weights": "--set model.pack_weights=true",
}
LOADING = _moved("revision", "model") | _moved("backend prefill-chunk", "engine")
DECODING = {
    **_moved("sink recent-mode span group-reduce granularity page-size"),
    **_moved("min-gap trigger-policy trigger-delay slow-start stride"),
    "--window": "--set window_prefill",
    "--dense-layer": "--set dense_layers",
}
GENERATING = {
    **DECODING,
    **_moved("cosine-threshold entropy-threshold random-rate"),
    **LOADING,
    **SWITCHES,
    "--synchronized": "--set engine.synchronized=true",
    "--do-sample": "--set sampling.do_sample=true",
    **_moved("top-k min-p repetition-penalty", "sampling"),
    "--audit-top": "--set audit.top",
    "--audit-layers": "--set audit.layers",
    "--audit-heads": "--set audit.heads",
    "--positions": "--set trace.positions=true",
    "--no-positions": "--set trace.positions=false",
    "--redact-text": "--set trace.redact_text=true",
    "--nvtx": "--set trace.nvtx=true",
    "--no-nvtx": "--set trace.nvtx=false",
}
# by command: what stands in an option's place; without a value it takes the option's own
MOVED: dict[str, Mapping[str, str]] = {
    "generate": GENERATING,
    "trace record": GENERATING,
    "bench": {
        **DECODING,
        **_moved("recent t-max"),
        "--trigger": "--set triggers",
        **LOADING,
        **SWITCHES,
        **_moved("warm-up", "bench"),
        "--prefill": "--set bench.prefill=true",
        "--synchronized": "--set bench.synchronized=true",
        **_moved("bandwidth memory", "forecast"),
    },
    "eval": {**LOADING, **_moved("windows", "eval")},
    "tune": {
        **_moved(
            "trigger-delay min-gap slow-start stride cosine-threshold recent span", flag="--search"
        ),
        **_moved("revision", "model"),
        **_moved("backend", "engine"),
        **_moved("sampler timeout batch-size", "tune"),
        "--mine": "--set tune.mine=true",
        "--no-mine": "--set tune.mine=false",
    },
    "tune heads": {},
    "serve": {},
    "trace replay": {
        **_moved(
            "min-gap trigger-delay slow-start stride cosine-threshold random-rate recent recent-mode"
            " sink span"
        ),
        "--trigger-id": "--set trigger_token_ids",
        "--seed": "--set trigger_seed",
    },
}


class Command(TyperCommand):
    """A command that knows which of its options have become settings."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option that has become a setting, before the others are parsed.

        Raises:
            ConfigError: With what to write instead.
        """
        if not ctx.resilient_parsing:  # a shell completes
            check_moved(_name(ctx), args)
        rest: list[str] = super().parse_args(ctx, args)
        return rest


def check_moved(command: str, words: Sequence[str]) -> None:
    """Refuse options that have become settings.

    Raises:
        ConfigError: With what to write instead.
    """
    moved = MOVED.get(command, {})
    for index, word in enumerate(words):
        if word == "--":
            return
        option, equals, value = word.partition("=")
        if option in moved:
            following = words[index + 1 : index + 2]
            given = [value] if equals else [one for one in following if not one.startswith("--")]
            raise ConfigError(
                f"{option} is a setting now; write {_instead(moved[option], given)} "
                "(sfi config list has all)"
            )


def _instead(target: str, given: Sequence[str]) -> str:
    flag, _, name = target.partition(" ")
    if "=" in name:
        return target
    value = given[0] if given else written(SETTINGS[name].default)
    if name == "triggers":
        value = written([value.replace("\\n", "\n")])
    return f"{flag} {shlex.quote(f'{name}={value}')}"


def _name(context: Any) -> str:
    # the words after `sfi`
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return " ".join(names)
