"""What a run tells: events, and the protocol of who listens."""
