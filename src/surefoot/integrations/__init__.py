"""Surefoot's run monitoring for other trainers."""

from surefoot.integrations.trainer import SurefootCallback

__all__ = ["SurefootCallback"]
