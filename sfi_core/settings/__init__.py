"""What is asked: the settings of a run, and the only home of their defaults. No torch."""
