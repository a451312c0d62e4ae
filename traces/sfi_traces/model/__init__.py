"""One recorded request: its steps, its memory, the selections in force and the supports, read by need."""
