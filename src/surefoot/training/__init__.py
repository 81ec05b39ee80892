"""Training: the loop, one step, the optimizer, checkpoints, metrics and the run folder."""
