"""`sfi tune --lossless`: how long to draft, and where to verify, from traces of lossless runs."""
