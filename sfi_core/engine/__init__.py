"""One step of a batch, whoever hosts it."""
