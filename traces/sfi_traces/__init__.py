"""Traces of a run: the observers that record one, and what reads, replays and tunes from it.

Reads `sfi_core`, never the reverse: the core knows the `Observer` protocol, not who implements it.
"""
