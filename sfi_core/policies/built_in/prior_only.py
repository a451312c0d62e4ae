"""Control: SFI without evidence, lambda = 1 in Eq. 14: only key norms and positions select."""

from sfi_core.policies.base import Evidence, EvidencePolicy, Selection, Triggered, best
from sfi_kernels.selector import key_norm_factor, normalized_position, position_factor, prior


class PriorOnly(EvidencePolicy, Triggered):
    """Shows the worth of the prior alone; sfi with `lambda_clip` 0 is the opposite, lambda = 0."""

    fills = True

    def select_after(self, context: Evidence) -> Selection:
        """Take the K positions with the highest prior."""
        settings = self.config.selector
        u_BT = normalized_position(context.allowed_BT)
        position_BT = position_factor(u_BT, settings.beta, settings.power, settings.eta)
        norm_BHT = key_norm_factor(context.key_norm_BHT, settings.gamma)
        prior_BHT = prior(norm_BHT, position_BT, context.allowed_BT)
        return best(context, prior_BHT, self.config.budget)
