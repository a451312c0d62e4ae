"""What every command shares: results, progress, tables and errors on a terminal."""
