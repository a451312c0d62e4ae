"""Which KV heads of a layer attend alike: similarity, clusters, agreement of parts of a corpus."""
