"""Whole decoding steps recorded once and replayed, as CUDA graphs."""
