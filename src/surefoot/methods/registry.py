"""From the settings of a run to the class that implements its method."""

from importlib import import_module

from surefoot.config import RunConfig
from surefoot.methods.base import Method


def method_of(run: RunConfig | type[RunConfig]) -> type[Method]:
    """Return the method that `implementation` of the settings names."""
    module, _, name = run.implementation.partition(":")
    method = getattr(import_module(module), name)
    assert isinstance(method, type)
    assert issubclass(method, Method)
    return method
