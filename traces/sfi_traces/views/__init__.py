"""What figures and reports show of a trace, as numbers and words."""
