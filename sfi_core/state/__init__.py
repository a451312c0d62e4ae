"""What a request has: the numbers that decide, its keys and values, its packed segment."""
