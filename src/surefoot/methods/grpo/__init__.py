"""Rollouts: completions of a model's own, rewarded and compared, ready to be trained on."""
