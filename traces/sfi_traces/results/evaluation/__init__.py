"""Results of `sfi eval`: their folder, their summaries, and the figure."""
