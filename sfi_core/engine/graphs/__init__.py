"""Decoding steps as CUDA graphs: recorded once, then replayed."""
