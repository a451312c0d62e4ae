"""Figures of a trace by matplotlib."""
