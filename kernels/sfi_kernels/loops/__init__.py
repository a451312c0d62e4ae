"""The loops that numba compiles, over numpy arrays; `numba_ops` checks the operands and calls them.

Every argument has one type, so that a machine compiles each entry once, for all dtypes, widths and group sizes:
pages are rows of 16-bit halves, and `kind` says what they hold. Entries with `begin` and `end` do these heads.
"""
