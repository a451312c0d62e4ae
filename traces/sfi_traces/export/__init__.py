"""Writes a trace in other programs' formats, as pieces of text: a large one is never whole in memory."""
