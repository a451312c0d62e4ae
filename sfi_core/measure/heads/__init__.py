"""Similarity of a layer's KV heads, clusters of heads, and agreement of clusters between texts."""
