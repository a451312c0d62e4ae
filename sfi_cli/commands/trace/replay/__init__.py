"""`sfi trace replay`."""
