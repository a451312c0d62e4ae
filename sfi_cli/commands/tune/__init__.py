"""`sfi tune`."""
