"""Writing a trace while a model runs."""
