"""`sfi bench`."""
