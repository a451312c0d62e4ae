"""A recorded trace, and one request of it: steps, memory, selections in force, supports; read by need."""
