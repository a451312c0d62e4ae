"""What the attention kernels share: the arithmetic of one tile of keys, and how large a tile is."""
