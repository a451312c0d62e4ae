"""Comparison of next-token distributions."""

import torch


def divergence(log_p_RV: torch.Tensor, log_q_RV: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) in nats of rows of log-probabilities, [R]; never negative."""
    p_RV = log_p_RV.exp()
    terms = torch.where(p_RV > 0, p_RV * (log_p_RV - log_q_RV), 0.0)
    # rounding may leave the sum just below zero
    return terms.sum(-1).clamp_min(0)


def compare_logits(
    logits_RV: torch.Tensor, dense_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare next-token distributions with dense attention's, row by row; see `LogitsEvent`.

    Returns:
        KL(dense || ours) in nats, [R], and whether both have the same most probable token, [R].
    """
    ours, dense = (x.float().log_softmax(-1) for x in (logits_RV, dense_RV))
    return divergence(dense, ours), ours.argmax(-1) == dense.argmax(-1)
