"""The engines of other libraries that run a model's forward passes."""
