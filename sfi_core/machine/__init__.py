"""This machine: its memory, its description, the versions of what is installed."""
