"""Quality of policies: tasks with exact answers, fidelity to full attention, and lm-eval."""
