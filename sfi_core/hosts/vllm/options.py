"""The plugin's settings that `sfi serve` takes by `--set`; no torch, no vLLM."""

from dataclasses import dataclass

from sfi_core.settings.fields import Table, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTable(Table):
    """A server's settings for sfi."""

    slots_memory: float = setting(
        0.25,
        "Share of the GPU's memory, or of the machine's on a CPU, that packed segments may take. A server "
        "whose budget and slots need more does not start.",
        above=0.0,
        most=1.0,
    )
    cache_salt: bool = setting(
        True,
        "Keep prefix caches of different settings apart. Keys and values of generated tokens depend on them.",
    )
