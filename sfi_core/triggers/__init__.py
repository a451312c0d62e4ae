"""When a step is slow: the trigger (Eq. 5), its token set, and signals besides tokens."""
