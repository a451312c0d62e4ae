"""What every command shares: one way to write results, progress, tables and errors."""
