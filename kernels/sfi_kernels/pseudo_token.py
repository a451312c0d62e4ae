"""A pseudo token: one term of a softmax that stands for all keys that are not read."""

from typing import NamedTuple

import torch

from sfi_kernels.shapes import check_shape


class PseudoToken(NamedTuple):
    """The pseudo tokens of a step, float32.

    `logit_BHG` is after scale and soft cap, -inf for no pseudo token; it may come in X parts, [B, H, G, X],
    whose log-sum-exp it is. `value_BHE` is finite for a fast request, anything for another.
    """

    logit_BHG: torch.Tensor
    value_BHE: torch.Tensor

    def part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp, as `partial_attention` returns a segment's."""
        B, H, G = self.logit_BHG.shape[:3]
        value_BHG1E = self.value_BHE[:, :, None, None].expand(B, H, G, 1, -1)
        logit_BHGX = self.logit_BHG.reshape(B, H, G, -1)
        return value_BHG1E, logit_BHGX.logsumexp(-1, keepdim=True)

    def of(self, rows: slice) -> "PseudoToken":
        """Return the pseudo tokens of some requests."""
        return PseudoToken(self.logit_BHG[rows], self.value_BHE[rows])

    def check(self, query_BHGD: torch.Tensor, width: int) -> None:
        """Raise `ValueError` unless the pseudo tokens fit the queries and the values' width."""
        B, H, G, _ = query_BHGD.shape
        parts = dict.fromkeys("X"[: self.logit_BHG.dim() - 3])
        check_shape(self.logit_BHG, "pseudo logit", B=B, H=H, G=G, **parts)
        check_shape(self.value_BHE, "pseudo value", B=B, H=H, E=width)
