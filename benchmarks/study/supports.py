"""Full attention's supports at every decoded step, and what pairs of them share."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from sfi_core.observers.events import AuditEvent
from sfi_core.observers.observer import NullObserver
from sfi_core.settings.engine import AuditConfig

SINK, RECENT = 4, 128  # tokens of the prompt that are no candidates: SFI reads them anyway

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Recorder(NullObserver):
    """Keeps what the audit says of one request.

    Attributes:
        index_L: For each layer its steps' positions, each [H, K] int32, padded with -1.
        mass_L: The positions' probabilities, each [H, K].
    """

    index_L: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    mass_L: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def on_audit(self, event: AuditEvent) -> None:
        """Keep a layer's step."""
        self.index_L[event.layer].append(event.index_HK)
        self.mass_L[event.layer].append(event.mass_HK)

    def mass(self, layer: int, prompt: int) -> Floats:
        """Return the probabilities of a layer's candidates [H, N, C]; 0 for what the audit left out.

        Candidates are the prompt's tokens but for its first 4 and last 128: the same at every step.
        """
        index_NHK = torch.stack(self.index_L[layer]).long()
        mass_NHK = torch.stack(self.mass_L[layer]).float()
        N, H, _ = index_NHK.shape
        candidates = prompt - RECENT - SINK
        inside = (index_NHK >= SINK) & (index_NHK < prompt - RECENT)
        place = torch.where(inside, index_NHK - SINK, candidates)  # one place more takes the rest
        mass_NHC = torch.zeros(N, H, candidates + 1).scatter_(2, place, mass_NHK * inside)
        mass_HNC: Floats = mass_NHC[:, :, :candidates].transpose(0, 1).contiguous().numpy()
        return mass_HNC

    def local(self, prompt: int) -> list[list[float]]:
        """Return the mean probability of the first 4 and the step's last 128 positions, by layer and head."""
        means = []
        for layer in sorted(self.index_L):
            index_NHK, mass_NHK = torch.stack(self.index_L[layer]), torch.stack(self.mass_L[layer]).float()
            at_N11 = prompt + torch.arange(len(index_NHK))[:, None, None]
            near_NHK = (index_NHK < SINK) & (index_NHK >= 0) | (index_NHK > at_N11 - RECENT)
            means.append((mass_NHK * near_NHK).sum(-1).mean(0).tolist())
        return means


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What supports of K candidates share: U pairs of a layer and a KV head, N steps.

    Attributes:
        overlap_UNN: Share of the K positions that two steps' supports have in common.
        mass_UNN: Probability at the first step of the support of the second.
        chance: The overlap of two random supports, K over the candidates.
    """

    overlap_UNN: Floats
    mass_UNN: Floats
    chance: float

    @classmethod
    def of(cls, recorder: Recorder, prompt: int, size: int) -> "Shared":
        """Compare all pairs of steps."""
        overlaps, masses = [], []
        candidates = prompt - RECENT - SINK
        for layer in sorted(recorder.index_L):
            mass_HNC = recorder.mass(layer, prompt)
            member_HNC = members(mass_HNC, size)
            turned_HCN = member_HNC.transpose(0, 2, 1)
            overlaps.append(member_HNC @ turned_HCN / size)
            masses.append(mass_HNC @ turned_HCN)
        return cls(overlap_UNN=np.concatenate(overlaps), mass_UNN=np.concatenate(masses), chance=size / candidates)


def members(mass_HNC: Floats, size: int) -> Floats:
    """Mark the `size` most probable candidates of each head and step with 1: [H, N, C]."""
    index_HNK = np.argpartition(mass_HNC, -size, axis=-1)[:, :, -size:]
    member_HNC = np.zeros_like(mass_HNC)
    np.put_along_axis(member_HNC, index_HNK, 1, axis=-1)
    return member_HNC


def audit_for(tokens: int, sizes: Sequence[int]) -> AuditConfig:
    """Return an audit that records enough positions for supports of `sizes` candidates in `tokens` steps."""
    return AuditConfig(every=1, top=max(sizes) + SINK + RECENT + tokens)
