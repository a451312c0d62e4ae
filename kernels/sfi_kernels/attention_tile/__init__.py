"""The arithmetic of one tile of keys, and its size, for all attention kernels."""
