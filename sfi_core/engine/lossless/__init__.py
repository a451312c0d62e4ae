"""Lossless decoding: fast steps draft, a slow step over the drafted tokens verifies them."""
