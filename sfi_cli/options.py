"""Options that several commands share, each declared once. Settings give their help and defaults."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli.settings.given import written
from sfi_cli.settings.tables import SETTINGS
from sfi_core.settings.config import PRESETS, SfiConfig
from sfi_core.settings.policy_names import built_in

# types of options
Words = list[str] | None
Number = int | None
File = Path | None
MODEL, METHOD, SAMPLING, OUTPUT = "Model", "Slow-fast decoding", "Sampling", "Output"
TRACE = "Trace"
TRIGGER = "A string that ends a sentence; repeat for more. \\n is a newline."


def option(panel: str, text: str, *flags: str, shown: str | bool = True, **more: Any) -> Any:
    """Declare an option of one command; the help shows `shown` as its default."""
    return typer.Option(*flags, help=text, show_default=shown, rich_help_panel=panel, **more)


def output(text: str, shown: str | bool = True) -> Any:
    """Declare --output of one command."""
    return option(OUTPUT, text, "--output", "-o", shown=shown)


def _setting(name: str, *flags: str, panel: str = METHOD, **more: Any) -> Any:
    # an option with the help and default of a setting
    declared = SETTINGS[name]
    shown = {"help": declared.brief, "show_default": written(declared.default), **more}
    return typer.Option(*flags, rich_help_panel=panel, **shown)


def sets(panel: str = METHOD, **more: Any) -> Any:
    """Declare `--set`."""
    shown = {"metavar": "NAME=VALUE", "help": "A setting of sfi config list; may repeat.", **more}
    return typer.Option("--set", rich_help_panel=panel, **shown)


Model = Annotated[
    str | None,
    option(
        MODEL,
        "Hub id, folder, GGUF file, or smollm2.",
        "--model",
        "-m",
        shown="the bundled checkpoint",
        envvar="SFI_MODEL",
    ),
]
Dtype = Annotated[str, option(MODEL, "auto, bfloat16, float16 or float32.")]
Device = Annotated[str, option(MODEL, "auto, cpu, cuda, cuda:1, ...")]
# not a setting: a config file must not switch it on
TrustRemoteCode = Annotated[bool, option(MODEL, "Run code from the checkpoint.", "--trust-remote-code")]
KvDeviceBudget = Annotated[
    str | None,
    _setting(
        "engine.kv_device_budget", "--kv-device-budget", panel=MODEL,
        help="Most of the KV cache on the device: 20%, 2GiB.", show_default="all",
    ),
]  # fmt: skip
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
Triggers = Annotated[
    Words, option(METHOD, TRIGGER, "--trigger", shown=" ".join(SfiConfig().triggers).replace("\n", "\\n"))
]
Temperature = Annotated[float | None, _setting("sampling.temperature", panel=SAMPLING)]
TopP = Annotated[float | None, _setting("sampling.top_p", panel=SAMPLING)]
Seed = Annotated[int, option(SAMPLING, "Seed of sampling.")]
Json = Annotated[bool, option(OUTPUT, "One JSON document on stdout.", "--json")]
Quiet = Annotated[bool, option(OUTPUT, "Nothing but data and errors.", "--quiet", "-q")]
OutputPath = Annotated[File, output("Write the data there instead.")]
Wide = Annotated[bool, option(OUTPUT, "All columns, on any terminal.", "--wide")]
Force = Annotated[bool, option(OUTPUT, "Overwrite the output.", "--force")]
TraceDir = Annotated[Path, typer.Argument(help="Folder of the trace.", metavar="DIR")]
RequestIndex = Annotated[Number, typer.Option("--request", help="Only this request.")]
Audit = Annotated[Number, _setting("audit.every", "--audit", panel=TRACE, show_default="off")]
