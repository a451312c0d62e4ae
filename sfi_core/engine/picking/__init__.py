"""Picking the next tokens from logits."""
