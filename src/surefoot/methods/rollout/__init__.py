"""Completions of the model in training: the engines that generate them, and how they are requested."""
