"""Refuse the run that cannot work, before it starts: a snapshot of this machine, and pure checks of it."""
