"""What `python benchmarks/smoke.py` does on a GPU that has never run sfi: a file for each kind of stage."""
