"""The end-to-end decoding benchmark of `sfi bench`."""
