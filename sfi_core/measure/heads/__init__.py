"""Which KV heads of a layer attend alike: similarity, clusters, agreement between parts of a corpus (SyncKV)."""
