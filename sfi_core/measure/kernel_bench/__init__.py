"""The kernel benchmark: check each op against its formula, then time the op and its rivals."""
