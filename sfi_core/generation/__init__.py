"""Our own loop around a hosted model: Algorithm 1, sampling, batches."""
