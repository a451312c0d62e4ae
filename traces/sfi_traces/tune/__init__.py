"""Searches settings on recorded runs, and confirms them by real runs (docs/tune.md)."""
