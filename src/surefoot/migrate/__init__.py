"""Reads what runs of other programs were told, and says the same as a run.yaml."""
