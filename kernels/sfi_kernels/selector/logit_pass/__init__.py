"""The Selector's launches that read logits: each query's log-sum-exp, and the power mean."""
