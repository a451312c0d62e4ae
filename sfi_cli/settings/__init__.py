"""Settings on the command line: `--set`, `--config`, completion, and what was an option once."""
