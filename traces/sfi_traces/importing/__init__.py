"""Selections and attention that other programs recorded, as a trace (docs/import.md)."""
