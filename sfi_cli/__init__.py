"""The `sfi` command line: options in, tables, JSON and exit codes out; no torch at import."""
