"""`sfi tune heads`."""
