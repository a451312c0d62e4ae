"""The end-to-end decoding benchmark: what `sfi bench` runs."""
