"""Use of trained models."""
