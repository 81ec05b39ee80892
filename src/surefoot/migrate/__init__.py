"""Conversion of the command lines, scripts and configs of other programs to a run.yaml."""
