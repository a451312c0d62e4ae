"""The study behind docs/evidence.md; `python benchmarks/study.py --help` shows its parts."""
