"""Distributed runs: process group, parallel dimensions, FSDP wrap order, rendezvous and elastic launch."""
