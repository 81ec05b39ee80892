"""Reward models: a model that gives an answer one number, trained on pairs of answers."""
