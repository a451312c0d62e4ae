"""The commands of `sfi`, one file each."""
