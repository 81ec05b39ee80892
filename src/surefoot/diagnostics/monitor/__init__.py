"""Watches a run from outside its ranks: events on disk, samples of processes and GPUs, evidence of stalls."""
