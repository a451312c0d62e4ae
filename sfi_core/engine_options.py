"""How the engine runs a step."""

from dataclasses import dataclass


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


DEFAULTS = EngineOptions()
