"""Attention over one work item: some of a request's keys."""
