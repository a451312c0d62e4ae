"""`sfi serve`: vLLM's server with slow-fast decoding."""

from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sfi_cli import options as o
from sfi_cli.settings.given import given
from sfi_core.hosts.vllm import SLOTS

SERVER = "Server"
PORT = 8000


class Serve(TyperCommand):
    """Says of an option that is not ours where vLLM's flags stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options; raise `ConfigError` for a flag of vLLM's before --."""
        known = [word for parameter in self.get_params(ctx) for word in (*parameter.opts, *parameter.secondary_opts)]
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known and not ctx.resilient_parsing:
                from sfi_core.errors import ConfigError

                near = "".join(f"; did you mean {option}?" for option in get_close_matches(name, known, 1, 0.8))
                raise ConfigError(f"sfi serve has no option {name}; if it is vLLM's, put it after --{near}")
        return super().parse_args(ctx, args)


def serve(
    flags: Annotated[
        o.Words,
        typer.Argument(metavar="-- FLAGS", help="vLLM's own flags, such as --max-model-len 32768.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        o.option(o.MODEL, "Hub id or folder.", "--model", "-m", shown="the bundled checkpoint", envvar="SFI_MODEL"),
    ] = None,
    policy: o.Policy = "sfi",
    preset: o.Preset = None,
    config: o.Config = None,
    sets: Annotated[o.Words, o.sets("serve")] = None,
    budget: o.Budget = None,
    recent: o.Recent = None,
    trigger: o.Triggers = None,
    t_max: o.TMax = None,
    slots: Annotated[int, o.option(o.METHOD, "Requests that may be sparse at once; others run dense.")] = SLOTS,
    host: Annotated[str, o.option(SERVER, "Address; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, o.option(SERVER, "Port.")] = PORT,
    trace: Annotated[o.File, o.option(o.TRACE, "Record a trace into this new folder.")] = None,
    audit: o.Audit = None,
) -> None:
    """Serve a model over HTTP with vLLM, its requests decoded slow-fast.

    vLLM's own OpenAI-compatible server runs, with sfi as a plugin. vLLM and sfi need an environment of
    their own (docs/vllm.md). Flags after -- go to vLLM. Ctrl-C ends the server.

    For example:

      sfi serve

      sfi serve --model Qwen/Qwen3-0.6B --config tuned.toml -- --max-model-len 32768

      sfi serve --model Qwen/Qwen3-0.6B --budget 1024 --slots 32 --trace run --audit 16
    """
    from sfi_cli.commands.serve.job import Service

    settings = given(
        "serve",
        preset=preset,
        file=config,
        sets=sets,
        options={"budget": budget, "recent": recent, "triggers": trigger, "t_max": t_max, "audit.every": audit},
    )
    plugin = {"policy": policy, "slots": slots, **({} if preset is None else {"preset": preset})}
    Service(settings, plugin, model, f"{host}:{port}", trace, flags or []).run()
