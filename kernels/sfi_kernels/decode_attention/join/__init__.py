"""Joining the work items of a request."""
