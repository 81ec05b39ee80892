"""Registry of the methods by name: where the settings of each are declared.

Methods are named by path, because they are built on this package and because reading a config imports no torch.
An installed package adds a method as an entry point of the group `surefoot.methods`.
"""

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic.fields import FieldInfo

from surefoot.config.schema import RunConfig
from surefoot.errors import ConfigError

BUILT_IN = {
    "sft": "surefoot.methods.sft.settings:SftConfig",
    "grpo": "surefoot.methods.grpo.settings:GrpoConfig",
    "dpo": "surefoot.methods.dpo.settings:DpoConfig",
    "kto": "surefoot.methods.kto.settings:KtoConfig",
    "orpo": "surefoot.methods.orpo.settings:OrpoConfig",
    "reward": "surefoot.methods.reward.settings:RewardConfig",
    "distill": "surefoot.methods.distill.settings:DistillConfig",
}
METHODS_OF_OTHERS = {
    "ppo": "there is no PPO here. `method: grpo` learns from the same rewards, without a value model",
    "gkd": "write `method: distill`",
    "rm": "write `method: reward`",
    "rloo": "write `method: grpo` with `advantage_estimator: rloo`",
    "pt": "write `method: sft` with `train_on: all`",
    **{loss: f"write `method: dpo` with `loss_type: {loss}`" for loss in ("simpo", "cpo", "ipo")},
}
"""Method of other trainers -> how to have it, or what is nearest."""
ENTRY_POINTS = "surefoot.methods"


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the methods of other installed packages by name; none of them is imported."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in BUILT_IN}


def method_names() -> list[str]:
    """Return the names that `method` in run.yaml may have."""
    return [*BUILT_IN, *installed()]


@cache
def settings_class(name: str) -> type[RunConfig]:
    """Return the settings class of a method. Raises: ConfigError if there is no method of this name."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        cls = getattr(import_module(module), attribute)
    elif name in installed():
        entry = installed()[name]
        try:
            cls = entry.load()
        except Exception as error:  # code of another package may raise anything
            raise ConfigError(f"method={name}: {entry.value} cannot be imported: {error}") from error
    else:
        near = difflib.get_close_matches(name, method_names(), n=1)
        hint = (
            METHODS_OF_OTHERS.get(name)
            or (f"did you mean {near[0]!r}?" if near else "")
            or f"must be {' or '.join(map(repr, method_names()))}"
        )
        raise ConfigError(f"method={name!r:.80}: {hint}")
    if not isinstance(cls, type) or not issubclass(cls, RunConfig):
        raise ConfigError(f"method={name}: {cls!r:.80} is no subclass of surefoot's RunConfig")
    if cls.model_fields["method"].default != name or not hasattr(cls, "implementation"):
        raise ConfigError(
            f"method={name}: {cls.__name__} needs `method` with the default {name!r}, and `implementation`"
        )
    return cls


def available_classes() -> tuple[dict[str, type[RunConfig]], list[str]]:
    """Return the settings class of each method by name, and the reasons why those of some packages cannot be loaded."""
    classes: dict[str, type[RunConfig]] = {}
    problems: list[str] = []
    for name in method_names():
        try:
            classes[name] = settings_class(name)
        except ConfigError as error:
            problems.append(str(error))
    return classes, problems


def methods_with(setting: str) -> list[str]:
    """Return the methods that have a setting of this name."""
    return [name for name, cls in available_classes()[0].items() if setting in cls.model_fields]


@cache
def known_fields() -> dict[str, FieldInfo]:
    """Return the settings of all built-in methods by name; those of every run come first."""
    fields = dict(RunConfig.model_fields)
    for name in BUILT_IN:
        fields |= {key: field for key, field in settings_class(name).model_fields.items() if key not in fields}
    return fields


def read_saved(values: Mapping[str, Any]) -> RunConfig:
    """Return the config that a run saved, from its settings by name.

    Older versions wrote the settings of all methods; those of others are left out. Raises: ValueError, ConfigError.
    """
    if not all(isinstance(name, str) for name in values):
        raise ValueError("a setting whose name is no text")
    kind = settings_class(str(values.get("method") or RunConfig.model_fields["method"].default))
    dropped = known_fields().keys() - kind.model_fields.keys()
    if values.get("method") is None:
        dropped.add("method")
    return kind(**{name: value for name, value in values.items() if name not in dropped})
