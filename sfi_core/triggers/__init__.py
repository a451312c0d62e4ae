"""When a step is slow: the trigger (Eq. 5) and its token set."""
