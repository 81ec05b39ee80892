"""Preflight checks: pure checks of a snapshot of this machine that refuse a run that cannot work, before it starts."""
