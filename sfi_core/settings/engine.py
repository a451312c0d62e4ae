"""How the engine runs a step."""

from dataclasses import dataclass, replace

from sfi_core.errors import ConfigError
from sfi_core.settings.device_budget import DeviceBudget
from sfi_core.settings.fields import check, setting

BACKENDS = ("auto", "torch", "triton")
PAGE_SIZE = 64  # tokens of a page under the triton backend: one tile


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's switches; each field says what it does."""

    overlap: bool = setting(
        True,
        "Run the Selector and the pack of a layer beside the next layers, on a second stream (Sec. 4.1). "
        "On a CPU they run in order either way.",
    )
    graphs: bool | None = setting(
        None, "Replay whole decoding steps as CUDA graphs; none does so where the run allows it."
    )
    lossless: bool = setting(
        False,
        "Generate full attention's own tokens: fast steps draft, slow steps verify what they drafted.",
    )
    fused: bool | None = setting(
        None,
        "Run a model's norms, rotations and gates as one Triton kernel each, in place of transformers' many. "
        "Modules whose source is not known keep their own. None does so on a CUDA device.",
    )
    kv_device_budget: str | None = setting(
        None,
        "Keep all keys and values in host memory, and at most this much on the device: a share of the cache "
        "such as 20%, or a size such as 2GiB. None keeps everything on the device.",
    )
    kv_page: int = setting(32, "Tokens of a page that goes to the host's memory.", least=1)

    def __post_init__(self) -> None:
        """Reject values of another type, and a device budget that is none."""
        check(self)
        if self.kv_device_budget is not None:
            DeviceBudget.parse(self.kv_device_budget)

    def on_several_ranks(self) -> "EngineOptions":
        """Return what a tensor-parallel run takes: its ranks call each other in the order of the layers.

        Its steps are not replayed either; `Decoder` says so.

        Raises:
            ConfigError: Graphs are asked for.
        """
        if self.graphs:
            raise ConfigError("graphs must be off under tensor parallelism, got graphs=True")
        return replace(self, overlap=False)


DEFAULTS = EngineOptions()
