"""The config of a run: its schema and how it is read."""

from surefoot.config.changes import changed_fields
from surefoot.config.load import LoadedConfig, as_yaml, load_config
from surefoot.config.schema import OF_ALL_RANKS, DatasetItem, RewardItem, RunConfig

__all__ = [
    "OF_ALL_RANKS",
    "DatasetItem",
    "LoadedConfig",
    "RewardItem",
    "RunConfig",
    "as_yaml",
    "changed_fields",
    "load_config",
]
