"""A checkpoint: loading, description, tensor parallelism, memory forecasts."""
