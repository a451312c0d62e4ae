"""The events of a run, and the protocol of its observers."""
