"""The engine: plans, runs and records each step of a batch of requests; a host runs the model around it.

`loop` decodes, `run` has the state of a batch, `attend` and `select` do a layer's work, `graphs` replay whole steps.
"""
