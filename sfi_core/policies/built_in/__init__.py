"""Our policies, one a file: `full_kv.py` has the class of the policy full-kv."""
