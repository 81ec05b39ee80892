"""The command `surefoot plan`: forecast, findings and settings that fit, from a config and the name of a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config import RunConfig, load_config
from surefoot.diagnostics.monitor.processes import room_bytes
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.models.resolve_model import resolve_model
from surefoot.planner.devices import DEVICES, GIB, Device, detect_gpu, get_device, measure_cpu
from surefoot.planner.forecast import Forecast, forecast
from surefoot.planner.suggest import SettingChanges, format_settings, suggest
from surefoot.planner.text import format_forecast, list_findings

MOST_NUMBER = 1e12
RUN_DEVICES = ("auto", "cpu", "cuda")
"""Values of `device` that a run accepts too."""


@dataclass(frozen=True)
class Plan:
    """Result of `surefoot plan`: the forecast, its findings, and changes of settings with their forecasts."""

    forecast: Forecast
    findings: list[Finding]
    changes: list[tuple[SettingChanges, Forecast]]
    price: float

    def as_text(self) -> str:
        return format_forecast(self.forecast, self.findings, self.changes, self.price)

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.forecast.as_dict(),
            **self._cost_entry(self.forecast),
            "findings": [finding.as_dict() for finding in self.findings],
            "changes": [
                {
                    "settings": changed,
                    "yaml": format_settings(changed),
                    "tokens_per_second": 1 / changed_forecast.seconds_per_token,
                    "device_peak_bytes": changed_forecast.device_peak[1],
                    "host_peak_bytes": changed_forecast.host_peak[1],
                    **self._cost_entry(changed_forecast),
                }
                for changed, changed_forecast in self.changes
            ],
        }

    def _cost_entry(self, candidate: Forecast) -> dict[str, float]:
        """Return the cost of 1000 steps as a JSON entry; empty without a price."""
        return {"cost_per_1000_steps": candidate.device_hours(1000) * self.price} if self.price else {}


def plan(config: str, overrides: Sequence[str]) -> Plan:
    """Plan the run of a config and its overrides.

    Raises: ConfigError, ModelError with the field that is to blame if it cannot be planned.
    """
    plan_options, run_overrides = _split_overrides(overrides)
    loaded = load_config(config, run_overrides)
    base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
    device = _find_device(plan_options.get("device", loaded.run.device))
    if plan_options.get("device") and loaded.run.device == "cpu":
        raise ConfigError(
            f"device={plan_options['device']} on the command line, and device=cpu ({loaded.where('device')}): "
            "leave one out."
        )
    is_this_machine = plan_options.get("device", "auto") in RUN_DEVICES
    host_bytes = int(_parse_number(plan_options, "host_gib") * GIB) or (room_bytes() if is_this_machine else 0)
    run = loaded.run.model_copy(update={"device": "cuda" if device.is_gpu else "cpu"})

    def forecast_run(candidate: RunConfig, *, is_least: bool = False) -> Forecast:
        return forecast(candidate, base, device, host_free_bytes=host_bytes, where=loaded.where, is_least=is_least)

    current = forecast_run(run)
    return Plan(
        current, list_findings(current, loaded), suggest(current, forecast_run), _parse_number(plan_options, "price")
    )


def _split_overrides(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (options of the plan, overrides of the run)."""
    plan_options: dict[str, str] = {}
    run_overrides = []
    for override in overrides:
        name, _, value = override.partition("=")
        if name in ("host_gib", "price") or (name == "device" and value not in RUN_DEVICES):
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


def _find_device(name: str) -> Device:
    """Return the device of a data sheet, or that of this machine. Raises: ConfigError."""
    if name not in RUN_DEVICES:
        return get_device(name)
    gpu = detect_gpu() if name != "cpu" else None
    if gpu is None and name == "cuda":
        raise ConfigError(
            f"device=cuda, but this machine has no GPU. Name one to plan for: device={'|'.join(DEVICES)}."
        )
    return gpu or measure_cpu(room_bytes())
