"""What figures and reports show of a trace, as plain numbers and words."""
