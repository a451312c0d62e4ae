"""Options that several commands share, each declared once. Defaults come from the config."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli.parsing import unescaped
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.config import (
    GROUP_REDUCTIONS,
    PRESETS,
    RECENT_MODES,
    TRIGGER_POLICIES,
    SfiConfig,
)

DEFAULTS = SfiConfig()
DEFAULT_AUDIT = AuditConfig()
MODEL, METHOD, SAMPLING, OUTPUT = "Model", "Slow-fast decoding", "Sampling", "Output"
TRACE, ENGINE = "Trace", "Engine"
# the core's own list comes with torch, which `--help` must not wait for
POLICIES = (
    "full-kv", "sfi", "streaming-llm", "snapkv", "h2o", "tova", "quest", "tidaldecode", "refreshkv",
    "oracle-top-k", "random-k", "prior-only",
)  # fmt: skip


def _names(names: tuple[str, ...] | dict[str, object]) -> str:
    return ", ".join(names)


def _setting(help_text: str, default: object) -> Any:
    return typer.Option(help=help_text, show_default=str(default), rich_help_panel=METHOD)


Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", envvar="SFI_MODEL", help="Hub id, folder, GGUF file, or smollm2.",
        show_default="the bundled checkpoint", rich_help_panel=MODEL,
    ),
]  # fmt: skip
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=MODEL)
]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=MODEL)]
Backend = Annotated[str, typer.Option(help="auto, torch or triton.", rich_help_panel=MODEL)]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code from the checkpoint.", rich_help_panel=MODEL
    ),
]
Policy = Annotated[
    str,
    typer.Option(help=f"{_names(POLICIES)}.", rich_help_panel=METHOD),
]
Preset = Annotated[
    str | None,
    typer.Option(help=f"{_names(PRESETS)}.", show_default="default", rich_help_panel=METHOD),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML file with settings; options win over it.", rich_help_panel=METHOD
    ),
]
Sink = Annotated[int | None, _setting("Anchor tokens kept from the start.", DEFAULTS.sink)]
Recent = Annotated[int | None, _setting("Tokens of the recent window.", DEFAULTS.recent)]
RecentMode = Annotated[str | None, _setting(f"{_names(RECENT_MODES)}.", DEFAULTS.recent_mode)]
Budget = Annotated[int | None, _setting("Selected tokens per KV head (K).", DEFAULTS.budget)]
TMax = Annotated[int | None, _setting("Most fast steps in a row; 0 for none.", DEFAULTS.t_max)]
MinGap = Annotated[
    int | None,
    _setting("Steps after a slow step in which triggers do not count.", DEFAULTS.min_gap),
]
TriggerDelay = Annotated[
    int | None,
    _setting("Steps from a boundary to its slow step; 0 is Eq. 5.", DEFAULTS.trigger_delay),
]
SlowStart = Annotated[
    int | None,
    _setting("Steps from the first on that are slow; 1 is the paper.", DEFAULTS.slow_start),
]
Span = Annotated[
    int | None, _setting("Positions on each side that a hit brings along.", DEFAULTS.span)
]
TriggerPolicy = Annotated[
    str | None, _setting(f"{_names(TRIGGER_POLICIES)}.", DEFAULTS.trigger_policy)
]
Stride = Annotated[int | None, _setting("Steps between slow steps under stride.", DEFAULTS.stride)]
CosineThreshold = Annotated[
    float | None,
    _setting("Under cosine: slow below this query cosine.", DEFAULTS.cosine_threshold),
]
EntropyThreshold = Annotated[
    float | None,
    _setting("Under entropy: slow above this entropy, in nats.", DEFAULTS.entropy_threshold),
]
RandomRate = Annotated[
    float | None, _setting("Under random: a step's chance to be slow.", DEFAULTS.random_rate)
]
Triggers = Annotated[
    list[str] | None,
    typer.Option(
        "--trigger", help="A string that ends a sentence; repeat for more. \\n is a newline.",
        show_default=" ".join(DEFAULTS.triggers).replace("\n", "\\n"), rich_help_panel=METHOD,
    ),
]  # fmt: skip
Window = Annotated[
    int | None,
    typer.Option(
        "--window", help="Prompt queries that make the first selection (W).",
        show_default=str(DEFAULTS.window_prefill), rich_help_panel=METHOD,
    ),
]  # fmt: skip
DenseLayers = Annotated[
    list[int] | None,
    typer.Option(
        "--dense-layer", help="A layer left dense; repeat for more.", rich_help_panel=METHOD
    ),
]
GroupReduce = Annotated[str | None, _setting(f"{_names(GROUP_REDUCTIONS)}.", DEFAULTS.group_reduce)]
Seed = Annotated[int, typer.Option(help="Seed of sampling.", rich_help_panel=SAMPLING)]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Nothing but data and errors.", rich_help_panel=OUTPUT)
]
OutputPath = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the data there instead.", rich_help_panel=OUTPUT),
]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite the output.", rich_help_panel=OUTPUT)
]

PackWeights = Annotated[
    bool,
    typer.Option(
        "--pack-weights",
        help="Lay bfloat16 or float16 weights out for decoding on a CPU without such arithmetic.",
        rich_help_panel=ENGINE,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap", help="Select and pack beside the next layers, on a second stream.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip
Graphs = Annotated[
    bool | None,
    typer.Option(
        "--graphs/--no-graphs", help="Replay whole steps as CUDA graphs.",
        show_default="where the run allows it", rich_help_panel=ENGINE,
    ),
]  # fmt: skip
Synchronized = Annotated[
    bool,
    typer.Option(
        "--synchronized", help="Make every request slow as soon as one is; for comparisons.",
        rich_help_panel=ENGINE,
    ),
]  # fmt: skip

TraceDir = Annotated[Path, typer.Argument(help="Folder of the trace.", metavar="DIR")]
RequestIndex = Annotated[int | None, typer.Option("--request", help="Only this request.")]
Audit = Annotated[
    int | None,
    typer.Option(
        "--audit",
        help="Compare every N-th step with dense attention; the tokens stay the same.",
        show_default="off",
        rich_help_panel=TRACE,
    ),
]
AuditTop = Annotated[
    int, typer.Option(help="Positions of an audited support.", rich_help_panel=TRACE)
]
AuditLayers = Annotated[
    str | None,
    typer.Option(help="Only these layers: 0,3,8-11.", show_default="all", rich_help_panel=TRACE),
]
AuditHeads = Annotated[
    str | None,
    typer.Option(help="Only these KV heads: 0,2-3.", show_default="all", rich_help_panel=TRACE),
]
Positions = Annotated[
    bool | None,
    typer.Option(
        "--positions/--no-positions", help="Record the positions of every selection.",
        show_default="while they are few", rich_help_panel=TRACE,
    ),
]  # fmt: skip
RedactText = Annotated[
    bool,
    typer.Option(
        "--redact-text",
        help="Keep token ids and text out of the trace.",
        rich_help_panel=TRACE,
    ),
]
Nvtx = Annotated[
    bool | None,
    typer.Option(
        "--nvtx/--no-nvtx", help="Mark steps and phases for Nsight Systems.",
        show_default="when a profiler is attached", rich_help_panel=TRACE,
    ),
]  # fmt: skip


def build_config(
    base: SfiConfig, preset: str | None, config: Path | None, changes: dict[str, object]
) -> SfiConfig:
    """Lay a config file over a preset and given options over both; `base` stands where no preset is named."""
    settings = base if preset is None else SfiConfig.preset(preset)
    if config is not None:
        settings = settings.merge_toml(config)
    given = {name: value for name, value in changes.items() if value is not None}
    if "triggers" in given:
        given["triggers"] = unescaped(given["triggers"])  # type: ignore[arg-type]
    return settings.replace(**given)
