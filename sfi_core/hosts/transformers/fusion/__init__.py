"""A model's norms, rotations and gates as one kernel each, in place of transformers' many."""
