"""Options that several commands share, each declared once. Settings give their help and defaults."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli.settings.tables import SETTINGS, settings_for
from sfi_cli.settings.text import completer, written
from sfi_core.settings.config import PRESETS, SfiConfig
from sfi_core.settings.policy_names import built_in, known

# types of options
Words = list[str] | None
Number = int | None
File = Path | None
MODEL, METHOD, SAMPLING, OUTPUT = "Model", "Slow-fast decoding", "Sampling", "Output"
TRACE = "Trace"


def option(panel: str, text: str, *flags: str, shown: str | bool = True, **more: Any) -> Any:
    """Declare an option of one command; the help shows `shown` as its default."""
    return typer.Option(*flags, help=text, show_default=shown, rich_help_panel=panel, **more)


def _setting(name: str, *flags: str, panel: str = METHOD, **more: Any) -> Any:
    # an option with the help and default of a setting
    one = SETTINGS[name]
    shown = {"help": one.brief, "show_default": written(one.default), **more}
    return typer.Option(*flags, rich_help_panel=panel, **shown)


def _one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    # completion of a name in a shell
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def sets(command: str, panel: str = METHOD, **more: Any) -> Any:
    """Declare `--set` of a command."""
    help_text = "A setting of sfi config list; may repeat."
    shown = {"metavar": "NAME=VALUE", "help": help_text, **more}
    complete = completer(settings_for(command))
    return typer.Option("--set", autocompletion=complete, rich_help_panel=panel, **shown)


Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", envvar="SFI_MODEL", help="Hub id, folder, GGUF file, or smollm2.",
        show_default="the bundled checkpoint", rich_help_panel=MODEL,
    ),
]  # fmt: skip
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=MODEL)]
TrustRemoteCode = Annotated[  # not a setting: a config file must not switch it on
    bool, typer.Option("--trust-remote-code", help="Run code from the checkpoint.", rich_help_panel=MODEL)
]
KvDeviceBudget = Annotated[
    str | None,
    _setting(
        "engine.kv_device_budget", "--kv-device-budget", panel=MODEL,
        help="Most of the KV cache on the device: 20%, 2GiB.", show_default="all",
    ),
]  # fmt: skip
_policy = partial(
    typer.Option, help=f"{', '.join(built_in())}, or a package's own.",
    autocompletion=_one_of(known), rich_help_panel=METHOD,
)  # fmt: skip
Policy = Annotated[str, _policy()]
PolicyOrDefault = Annotated[str | None, _policy(show_default="sfi; codescan for the drafts of --lossless")]
Preset = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(PRESETS)}.", show_default="default", autocompletion=_one_of(lambda: PRESETS),
        rich_help_panel=METHOD,
    ),
]  # fmt: skip
Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file; --set and options override it.", rich_help_panel=METHOD)
]
Budget = Annotated[int | None, _setting("budget")]
Recent = Annotated[int | None, _setting("recent")]
TMax = Annotated[int | None, _setting("t_max")]
Lossless = Annotated[bool, typer.Option("--lossless", help="Full attention's own tokens.", rich_help_panel=METHOD)]
DraftMax = Annotated[int | None, _setting("draft.max_tokens", "--draft-max")]
Triggers = Annotated[
    list[str] | None,
    typer.Option(
        "--trigger", help="A string that ends a sentence; repeat for more. \\n is a newline.",
        show_default=" ".join(SfiConfig().triggers).replace("\n", "\\n"), rich_help_panel=METHOD,
    ),
]  # fmt: skip
Temperature = Annotated[float | None, _setting("sampling.temperature", panel=SAMPLING)]
TopP = Annotated[float | None, _setting("sampling.top_p", panel=SAMPLING)]
Seed = Annotated[int, typer.Option(help="Seed of sampling.", rich_help_panel=SAMPLING)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but data and errors.", rich_help_panel=OUTPUT)]
OutputPath = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the data there instead.", rich_help_panel=OUTPUT)
]
Wide = Annotated[bool, typer.Option("--wide", help="All columns, on any terminal.", rich_help_panel=OUTPUT)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.", rich_help_panel=OUTPUT)]
TraceDir = Annotated[Path, typer.Argument(help="Folder of the trace.", metavar="DIR")]
RequestIndex = Annotated[int | None, typer.Option("--request", help="Only this request.")]
Audit = Annotated[int | None, _setting("audit.every", "--audit", panel=TRACE, show_default="off")]
