"""The config of a run: its schema and its loader."""

from surefoot.config.changes import changed_fields
from surefoot.config.load import LoadedConfig, as_yaml, load_config
from surefoot.config.methods import known_fields, method_names, read_saved, settings_class
from surefoot.config.rollout import RolloutConfig, rollout_settings, vllm_settings
from surefoot.config.schema import DatasetItem, MayDiffer, RunConfig

__all__ = [
    "DatasetItem",
    "LoadedConfig",
    "MayDiffer",
    "RolloutConfig",
    "RunConfig",
    "as_yaml",
    "changed_fields",
    "known_fields",
    "load_config",
    "method_names",
    "read_saved",
    "rollout_settings",
    "settings_class",
    "vllm_settings",
]
