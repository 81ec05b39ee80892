"""Lookup of the class that implements a run's method."""

from importlib import import_module

from surefoot.config import RunConfig
from surefoot.methods.base import Method


def method_of(run: RunConfig | type[RunConfig]) -> type[Method]:
    """Return the method class that the settings name in `implementation`."""
    module, _, name = run.implementation.partition(":")
    method = getattr(import_module(module), name)
    assert isinstance(method, type)
    assert issubclass(method, Method)
    return method
