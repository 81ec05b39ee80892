"""The command `surefoot plan`: its config and options, which are checked before torch is imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from surefoot.data.given_rows import load_given
from surefoot.errors import ConfigError
from surefoot.models.resolve_model import check_is_known

if TYPE_CHECKING:
    from surefoot.planner.plan import Plan

MOST_NUMBER = 1e12
RUN_DEVICES = ("auto", "cpu", "cuda")
"""Values of `device` that a run accepts too."""


def plan(
    config: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> "Plan":
    """Plan the run of a config and its overrides, with `settings` on top; both may hold options of the plan.

    Raises: ConfigError, ModelError with the field that is to blame if it cannot be planned.
    """
    options = [f"{name}={value}" for name, value in settings.items() if _is_option(name, value) or name == "nodes"]
    plan_options, run_overrides = _split_overrides([*overrides, *options])
    run_settings = {name: value for name, value in settings.items() if f"{name}={value}" not in options}
    loaded = load_given(config, run_overrides, run_settings)
    check_is_known(loaded.run.model, loaded.where("model"))
    host_gib, price = (_parse_number(plan_options, name) for name in ("host_gib", "price"))
    from surefoot.planner.plan import plan_run

    return plan_run(loaded, plan_options.get("device"), host_gib=host_gib, price=price)


def _split_overrides(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (options of the plan, overrides of the run)."""
    plan_options: dict[str, str] = {}
    run_overrides = []
    for override in overrides:
        name, _, value = override.partition("=")
        if _is_option(name, value):
            plan_options[name] = value.lower()
        elif name == "nodes":
            run_overrides += [f"nnodes={value}"]
        else:
            run_overrides.append(override)
    if any(override.startswith("nnodes=") for override in run_overrides) and not any(
        override.startswith("rdzv_endpoint=") for override in run_overrides
    ):
        run_overrides.append("rdzv_endpoint=node0:29500")  # a plan runs no rendezvous
    return plan_options, run_overrides


def _is_option(name: str, value: object) -> bool:
    """Return whether a setting is one of the plan, not of the run."""
    return name in ("host_gib", "price") or (name == "device" and value not in RUN_DEVICES)


def _parse_number(plan_options: dict[str, str], name: str) -> float:
    try:
        value = float(plan_options.get(name, "0"))
    except ValueError:
        value = -1.0
    if not 0 <= value < MOST_NUMBER:
        raise ConfigError(
            f"{name}={plan_options[name]} is not a number from 0 to {MOST_NUMBER:.0e} (command line). Leave it out, "
            f"or write {name}=2.5."
        )
    return value
