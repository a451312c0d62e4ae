"""`sfi serve`."""
