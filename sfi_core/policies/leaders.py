"""Which KV head of a layer stands for which: SyncKV's representative heads (R-heads)."""

from functools import cache
from pathlib import Path

import torch

from sfi_core.errors import ConfigError
from sfi_core.policies.head_clusters import HeadClusters

EVEN = "even"


class Leaders:
    """The representative of every KV head, by layer.

    Attributes:
        clusters: What the file says; None where each layer's heads are split evenly.
        count: Representatives of a layer where they are.
    """

    def __init__(self, source: str | None, setting: str, count: int) -> None:
        """Read the file of clusters.

        Args:
            source: The file, or "even".
            setting: The setting that names the source, for the error.
            count: Representatives of a layer under "even".

        Raises:
            ConfigError: No source.
            InputError: The file cannot be read or is damaged.
        """
        if source is None:
            raise ConfigError(
                f"{setting} must be a file of head clusters, got none; make one with `sfi tune heads`, or "
                f"set {setting}={EVEN}"
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


def mask_of(leaders: tuple[int, ...], like_BHX: torch.Tensor) -> torch.Tensor:
    """Return which heads are representatives, [B, H] bool, for as many requests as `like` has."""
    return _mask(leaders, like_BHX.device).expand(len(like_BHX), -1)


@cache
def _mask(leaders: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # sent once, not in every layer of every step
    return torch.tensor([head in leaders for head in range(len(leaders))], device=device)


def places_of(leaders: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the representatives in order, and for each head the place of its own among them."""
    chosen = sorted(set(leaders))
    return chosen, [chosen.index(leader) for leader in leaders]


def columns(value_BHX: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """Return some heads of a tensor, one by one: a list as an index would wait for the device."""
    return torch.stack([value_BHX[:, head] for head in heads], 1)
