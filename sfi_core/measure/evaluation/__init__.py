"""Quality of policies: tasks with exact answers, fidelity to full attention, a model for lm-eval."""
