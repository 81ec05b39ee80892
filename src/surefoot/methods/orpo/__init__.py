"""Odds-ratio preference optimisation."""
