"""A serving engine's batch over its own paged cache, whatever the engine: it knows nothing of vLLM, which uses it.

The engine's scheduler sends each pass a `Plan`; the worker's `WorkerEngine` enters it with the rows of the batch.
"""
