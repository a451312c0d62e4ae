"""Options that several commands share, each declared once, and the model that they name.

Settings give their help and defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli.settings import SETTINGS, Given, ModelTable, written
from sfi_core.errors import ConfigError
from sfi_core.settings.config import PRESETS, TRIGGER_POLICIES, SfiConfig
from sfi_core.settings.policy_names import built_in

# types of options
Words = list[str] | None
Text = str | None
Number = int | None
Real = float | None
File = Path | None
MODEL, METHOD, SAMPLING, OUTPUT = "Model", "Slow-fast decoding", "Sampling", "Output"
TRACE = "Trace"
POLICIES_OF_TRIGGERS = f"{', '.join(TRIGGER_POLICIES)}; or codescan."
TRIGGER_SET = "A set of trigger strings, blanks between: NAME='. ? !'. Repeat for more."
TRIGGER = "A string that ends a sentence; repeat for more. \\n is a newline."


def option(panel: str, text: str, *flags: str, shown: str | bool = True, **more: Any) -> Any:
    """Declare an option of one command; the help shows `shown` as its default."""
    return typer.Option(*flags, help=text, show_default=shown, rich_help_panel=panel, **more)


def output(text: str, shown: str | bool = True) -> Any:
    """Declare --output of one command."""
    return option(OUTPUT, text, "--output", "-o", shown=shown)


def plot(what: str) -> Any:
    """Declare --plot of one command."""
    return option(OUTPUT, f"Draw {what} to a .png or .svg.")


def model(text: str) -> Any:
    """Declare --model of one command."""
    return option(MODEL, text, "--model", "-m", shown="the bundled checkpoint", envvar="SFI_MODEL")


def _setting(name: str, *flags: str, panel: str = METHOD) -> Any:
    # an option with the help and default of a setting
    return option(panel, SETTINGS[name].brief, *flags, shown=written(SETTINGS[name].default))


def sets(
    panel: str = METHOD, text: str = "A setting of sfi config list; may repeat.", metavar: str = "NAME=VALUE"
) -> Any:
    """Declare `--set`."""
    return option(panel, text, "--set", metavar=metavar)


Sets = Annotated[Words, sets()]
Model = Annotated[str | None, model("Hub id, folder, GGUF file, or smollm2.")]
Dtype = Annotated[str, option(MODEL, "auto, bfloat16, float16 or float32.")]
Device = Annotated[str, option(MODEL, "auto, cpu, cuda, cuda:1, ...")]
# not a setting: a config file must not switch it on
TrustRemoteCode = Annotated[bool, option(MODEL, "Run code from the checkpoint.", "--trust-remote-code")]
PromptCache = Annotated[File, option(MODEL, "Keep the prompt in this folder; go on behind what it has.")]
KvDeviceBudget = Annotated[Text, option(MODEL, "Most of the KV cache on the device: 20%, 2GiB.", shown="all")]
_policy = partial(option, METHOD, f"{', '.join(built_in())}, or a package's own.")
Policy = Annotated[str, _policy()]
PolicyOrDefault = Annotated[str | None, _policy(shown="sfi; codescan for the drafts of --lossless")]
Preset = Annotated[str | None, option(METHOD, f"{', '.join(PRESETS)}.", shown="default")]
Config = Annotated[File, option(METHOD, "TOML file; --set and options override it.", "--config")]
Budget = Annotated[Number, _setting("budget")]
Recent = Annotated[Number, _setting("recent")]
TMax = Annotated[Number, _setting("t_max")]
Lossless = Annotated[bool, option(METHOD, "Full attention's own tokens.", "--lossless")]
DraftMax = Annotated[Number, _setting("draft.max_tokens", "--draft-max")]
_ends = " ".join(SfiConfig().triggers).replace("\n", "\\n")
Triggers = Annotated[Words, option(METHOD, TRIGGER, "--trigger", shown=_ends)]
Temperature = Annotated[Real, _setting("sampling.temperature", panel=SAMPLING)]
TopP = Annotated[Real, _setting("sampling.top_p", panel=SAMPLING)]
Seed = Annotated[int, option(SAMPLING, "Seed of sampling.")]
Json = Annotated[bool, option(OUTPUT, "One JSON document on stdout.", "--json")]
Quiet = Annotated[bool, option(OUTPUT, "Nothing but data and errors.", "--quiet", "-q")]
OutputPath = Annotated[File, output("Write the data there instead.")]
Wide = Annotated[bool, option(OUTPUT, "All columns, on any terminal.", "--wide")]
Force = Annotated[bool, option(OUTPUT, "Overwrite the output.", "--force")]
TraceDir = Annotated[Path, typer.Argument(help="Folder of the trace.", metavar="DIR")]
RequestIndex = Annotated[Number, typer.Option("--request", help="Only this request.")]
Audit = Annotated[Number, option(TRACE, SETTINGS["audit.every"].brief, "--audit", shown="off")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model of a command."""

    model: str | None  # hub id, folder, GGUF file or alias; None is the bundled checkpoint
    loading: dict[str, Any]  # other arguments of `load`
    random_weights: str | None = None  # a config file or a known architecture, instead of a checkpoint; None for none
    seed: int = 0  # seed of random weights

    @classmethod
    def of(cls, settings: Given, model: str | None, dtype: str, device: str, trust: bool, **more: Any) -> "Subject":
        """Take the options of a command; `trust` allows code from the checkpoint."""
        table = settings.table(ModelTable).to_dict()
        return cls(model=model, loading={**table, "dtype": dtype, "device": device, "trust_remote_code": trust}, **more)

    @property
    def name(self) -> str:
        """The model's name in documents."""
        return self.random_weights or self.model or "bundled"

    def check(self) -> None:
        """Raise `ConfigError` for both a checkpoint and random weights, else as `check_weights`."""
        if self.model is not None and self.random_weights is not None:
            raise ConfigError(f"random_weights must come without --model, got {self.random_weights} and {self.model}")
        from sfi_core.models.load import check_weights, resolve_device, resolve_dtype

        device, dtype = resolve_device(self.loading["device"]), resolve_dtype(self.loading["dtype"])
        check_weights(self.loading["weights"], device, dtype)

    def loaded(self, check: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
        """Return the model and its tokenizer; `check` may refuse a checkpoint's config before its weights are read."""
        from sfi_core.models.load import load, load_tokenizer, resolve_device

        if self.random_weights is None:
            return load(self.model, **self.loading, check=check)
        from sfi_core.measure.bench.architectures import random_config, random_model
        from sfi_core.models.linear import round_weights

        device = resolve_device(self.loading["device"])
        model = random_model(random_config(self.random_weights), device, self._dtype(), self.seed)
        if self.loading["weights"] == "int8":
            round_weights(model.float())
        return model, load_tokenizer()

    def unloaded(self) -> Any:
        """Return the model without weights, on the meta device."""
        import torch

        from sfi_core.measure.bench.architectures import empty_model, model_config, random_config

        meta = torch.device("meta")
        if self.random_weights is not None:
            return empty_model(random_config(self.random_weights), meta, self._dtype())
        config = model_config(self.model)
        asked = self._dtype() if self.loading["dtype"] != "auto" else config.dtype
        return empty_model(config, meta, asked or torch.bfloat16)

    def _dtype(self) -> Any:
        import torch

        from sfi_core.models.load import resolve_dtype

        dtype = resolve_dtype(self.loading["dtype"])
        return torch.bfloat16 if dtype == "auto" else dtype
