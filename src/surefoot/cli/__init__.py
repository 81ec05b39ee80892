"""The command line: a file of commands for each thing that a user does."""

from surefoot.cli.main import build_parser, main

__all__ = ["build_parser", "main"]
