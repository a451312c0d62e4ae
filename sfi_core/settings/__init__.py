"""The settings of a run and their defaults. No torch."""
