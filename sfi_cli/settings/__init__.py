"""Settings on the command line: `--set`, `--config` and completion."""
