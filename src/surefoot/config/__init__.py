"""The config of a run: its schema and how it is read."""

from surefoot.config.load import LoadedConfig, as_yaml, changed_fields, load_config
from surefoot.config.schema import RunConfig

__all__ = ["LoadedConfig", "RunConfig", "as_yaml", "changed_fields", "load_config"]
