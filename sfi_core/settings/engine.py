"""How the engine runs a step."""

from dataclasses import dataclass, replace

from sfi_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's switches.

    Attributes:
        overlap: Run the Selector and the pack of a layer beside the next layers, on a second stream
            (Sec. 4.1); on a CPU they run in order either way.
        graphs: Replay whole decoding steps as CUDA graphs; None does so where the run allows it.
        synchronized: Make every request slow as soon as one is, as engines do that switch a whole batch. For
            comparisons: it reads more, so it may also choose other tokens.
    """

    overlap: bool = True
    graphs: bool | None = None
    synchronized: bool = False

    def on_several_ranks(self) -> "EngineOptions":
        """Return what a tensor-parallel run takes: its ranks call each other in the order of the layers.

        Raises:
            ConfigError: Graphs are asked for.
        """
        if self.graphs:
            raise ConfigError("graphs must be off under tensor parallelism, got graphs=True")
        return replace(self, overlap=False, graphs=False)


DEFAULTS = EngineOptions()
