"""Settings searched on recorded runs, and confirmed by real ones (docs/tune.md)."""
