"""The trainer, its checkpoints and its evaluation."""
