"""The bundled checkpoint: its synthetic corpus, its training script and its weights."""
