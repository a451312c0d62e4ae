"""Which KV head of a layer stands for which: SyncKV's representative heads (R-heads)."""

from pathlib import Path

from sfi_core.errors import ConfigError
from sfi_core.policies.head_clusters import HeadClusters

EVEN = "even"


class Leaders:
    """The representative of every KV head, by layer.

    Attributes:
        clusters: What the file says; None where each layer's heads are split evenly.
        count: Representatives of a layer where they are.
    """

    def __init__(self, source: str | None, count: int) -> None:
        """Read the file of clusters.

        Args:
            source: The file, or "even".
            count: Representatives of a layer under "even".

        Raises:
            ConfigError: No source.
            InputError: The file cannot be read or is damaged.
        """
        if source is None:
            raise ConfigError(
                "synckv.heads must be a file of head clusters, got none; make one with `sfi tune heads`, or "
                f"set synckv.heads={EVEN}"
            )
        self.clusters = None if source == EVEN else HeadClusters.load(Path(source))
        self.count = count

    def of(self, layer: int, heads: int) -> tuple[int, ...]:
        """Return the representative of each of a layer's KV heads.

        Raises:
            ConfigError: More representatives than heads.
        """
        if self.clusters is not None:
            return self.clusters.leader_of(layer)
        if self.count > heads:
            raise ConfigError(
                f"representatives must be at most the layer's {heads} KV heads, got {self.count}"
            )
        return tuple(
            -(-(head * self.count // heads) * heads // self.count) for head in range(heads)
        )
