"""A checkpoint: how it is loaded, described and split, and what it will need."""
