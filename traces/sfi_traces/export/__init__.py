"""A trace in other programs' formats, as pieces of text, so that a large one is never whole in memory."""
