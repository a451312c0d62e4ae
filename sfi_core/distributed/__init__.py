"""Several processes: torchrun's environment, and the ranks that share a model."""
