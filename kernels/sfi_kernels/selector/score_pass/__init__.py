"""The Selector's launches after the power mean: the prior's weight, the log score, its refinement."""
