"""Lookup of the class that implements a run's method."""

from importlib import import_module

from surefoot.config import RunConfig
from surefoot.errors import ConfigError
from surefoot.methods.base import Method


def method_of(run: RunConfig | type[RunConfig]) -> type[Method]:
    """Return the method class that the settings name in `implementation`. Raises: ConfigError if there is none."""
    module, _, name = run.implementation.partition(":")
    try:
        method = getattr(import_module(module), name)
    except Exception as error:  # code of another package may raise anything
        raise ConfigError(f"method: {run.implementation} cannot be imported: {error}") from error
    if not isinstance(method, type) or not issubclass(method, Method):
        raise ConfigError(f"method: {run.implementation} is no subclass of surefoot's Method")
    return method
