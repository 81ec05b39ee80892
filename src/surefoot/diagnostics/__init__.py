"""Diagnostics watch, check and explain runs. The core does not import them."""
