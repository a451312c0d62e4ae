"""What a run needs, in bytes: of memory, of a step, of two tiers; nothing runs."""
