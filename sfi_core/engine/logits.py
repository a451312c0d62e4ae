"""How far next-token distributions are from each other."""

import torch


def compare_logits(
    logits_RV: torch.Tensor, dense_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare next-token distributions with dense attention's, row by row; see `LogitsEvent`.

    Returns:
        KL(dense || ours) in nats, [R], and whether both have the same most probable token, [R].
    """
    ours, dense = (x.float().log_softmax(-1) for x in (logits_RV, dense_RV))
    weight = dense.exp()
    terms = torch.where(weight > 0, weight * (dense - ours), 0.0)
    return terms.sum(-1), ours.argmax(-1) == dense.argmax(-1)
