"""`sfi eval`."""
