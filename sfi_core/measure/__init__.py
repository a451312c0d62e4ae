"""Benchmarks, evaluation and a check of the machine. Nothing else in the core imports this package."""
