"""SQL over a trace, and the rules that a trace must keep."""
