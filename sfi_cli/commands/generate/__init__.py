"""`sfi generate`."""
