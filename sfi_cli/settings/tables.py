"""All settings there are: `SfiConfig`, and tables around it that only the command line has."""

from dataclasses import dataclass

from sfi_core.hosts.vllm import ServeTable
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import WEIGHTS, AuditConfig, EngineOptions, Sampling
from sfi_core.settings.fields import Setting, Table, setting, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable(Table):
    """What a trace holds."""

    positions: bool | None = setting(None, "Record the positions of every selection; none does so while they are few.")
    redact_text: bool = setting(False, "Keep token ids and text out of the trace.")
    spans: bool | None = setting(
        None,
        "Time the phases inside steps, which then run one kernel after the other; none does so only in steps "
        "that are not replayed as CUDA graphs; false times none, outside steps neither.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable(Table):
    """Which weights, and how they lie in memory."""

    revision: str | None = setting(None, "Branch, tag or commit on the hub.")
    weights: str = setting(
        "auto",
        "auto: the checkpoint's dtype, on a CPU a GGUF file's blocks; floats: of a GGUF file unpacked; int8: matrices "
        "rounded to 8 bits, with a scale for 32 numbers, on a CPU.",
        choices=WEIGHTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable(Table):
    """How `sfi bench` measures."""

    warm_up: int = setting(4, "Decoding steps before those that are measured.", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastTable(Table):
    """The machine of `sfi bench --forecast`."""

    bandwidth: float | None = setting(None, "GB/s of the memory; none measures this machine's.", above=0)
    memory: float | None = setting(None, "GB of memory; none takes this machine's.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTable(Table):
    """Details of `sfi eval`."""

    windows: int = setting(4, "Places of the text of --fidelity, evenly apart.", least=1)


TRIALS = 200  # of `sfi tune`, unless --trials says otherwise
TABLES: dict[str, type] = {
    "engine": EngineOptions,
    "audit": AuditConfig,
    "trace": TraceTable,
    "sampling": Sampling,
    "model": ModelTable,
    "bench": BenchTable,
    "forecast": ForecastTable,
    "eval": EvalTable,
    "serve": ServeTable,
}
DECODING = settings_of(SfiConfig)
SETTINGS: dict[str, Setting] = DECODING | {
    name: declared for table, cls in TABLES.items() for name, declared in settings_of(cls, table).items()
}
SEARCHED = (  # the dimensions of `sfi tune`, besides the triggers
    "t_max", "trigger_delay", "min_gap", "slow_start", "stride", "budget", "recent", "span",
)  # fmt: skip
REPLAYED = (
    *SEARCHED, "trigger_token_ids", "random_rate", "trigger_seed", "recent_mode", "sink", "page_size",
)  # fmt: skip
GENERATING = (*DECODING, "engine", "audit", "trace", "sampling", "model")
TIERS = ("engine.kv_device_budget", "engine.kv_page")
# which steps are slow, which `sfi bench` states
TRIGGERING = (
    "t_max", "min_gap", "triggers", "trigger_token_ids", "trigger_policy", "stride", "random_rate", "trigger_seed",
    "slow_start",
)  # fmt: skip
# by command: the tables and settings that have an effect on it
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": GENERATING,
    "chat": (*DECODING, "engine", "trace", "sampling", "model"),
    "trace record": GENERATING,
    "bench": (
        *(name for name in DECODING if name not in TRIGGERING),
        "engine.overlap", "engine.graphs", "engine.backend", "engine.kv_dtype",
        *TIERS, "model", "bench", "forecast",
    ),
    "eval": ("engine.backend", "engine.kv_dtype", "engine.prefill_chunk", *TIERS, "model.revision", "eval"),
    "tune": ("engine.backend", "engine.prefill_chunk", *TIERS, "model.revision"),
    "tune heads": ("engine.backend", "engine.prefill_chunk", "model.revision"),
    "trace replay": ("trigger_policy", *REPLAYED),
    "serve": (
        *(name for name in DECODING if not name.startswith("draft.")),
        "audit.every", "trace.redact_text", "model.revision", "serve",
    ),
}  # fmt: skip


DIMENSIONS = {name: SETTINGS[name] for name in ("trigger_policy", *SEARCHED)}


def settings_for(command: str) -> dict[str, Setting]:
    """List the settings that have an effect on a command."""
    accepted = COMMANDS[command]
    return {
        name: declared for name, declared in SETTINGS.items() if name in accepted or name.partition(".")[0] in accepted
    }


def places(name: str) -> list[str]:
    """List the commands on which a setting has an effect."""
    commands = [command for command in COMMANDS if name in settings_for(command)]
    return [*commands, "tune --search"] if name in DIMENSIONS else commands
