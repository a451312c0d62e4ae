"""Imports selections and attention that other programs recorded (docs/import.md)."""
