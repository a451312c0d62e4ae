"""Results of `sfi eval`: their folder, what they come to, and the figure."""
