"""Several processes: torchrun's environment, and the ranks that a model is split over."""
