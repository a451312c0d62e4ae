"""`sfi kernel-bench`."""
