"""Plan of a run: forecast, findings and settings that fit, for a config and a device."""

from dataclasses import dataclass
from typing import Any

from surefoot.config import LoadedConfig, RunConfig
from surefoot.config.schema import AUTO
from surefoot.data.sources import check_files_exist
from surefoot.errors import ConfigError, DataError
from surefoot.findings import Finding
from surefoot.models.resolve_model import resolve_model
from surefoot.planner.choose import choose_for_memory, list_choices
from surefoot.planner.command import RUN_DEVICES
from surefoot.planner.devices import DEVICES, GIB, Device, detect_gpu, get_device, measure_cpu
from surefoot.planner.forecast import Forecast, forecast
from surefoot.planner.suggest import SettingChanges, format_settings, suggest
from surefoot.planner.text import format_forecast, list_findings
from surefoot.system.memory import room_bytes


@dataclass(frozen=True)
class Plan:
    """Result of `surefoot plan`: the forecast, its findings, and changes of settings with their forecasts."""

    forecast: Forecast
    findings: list[Finding]
    changes: list[tuple[SettingChanges, Forecast]]
    price: float
    chosen: str | None = None
    """Values of settings that are `auto`, and why."""
    missing_data: str | None = None
    """Which data files of the run are not there; a plan reads none of them."""

    def as_text(self) -> str:
        notes = [f"{note}\n" for note in (self.chosen, self.missing_data) if note is not None]
        return "\n".join([*notes, format_forecast(self.forecast, self.findings, self.changes, self.price)])

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.forecast.as_dict(),
            **self._cost_entry(self.forecast),
            "gradient_checkpointing": self.forecast.run.gradient_checkpointing,
            "per_device_train_batch_size": self.forecast.run.per_device_train_batch_size,
            "missing_data": self.missing_data,
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


def plan_run(loaded: LoadedConfig, sheet: str | None, *, host_gib: float, price: float) -> Plan:
    """Plan a run.

    `sheet`: name of the device's data sheet if it is not the run's own device; `host_gib`: host memory of its machine,
    0 for what is free here; `price`: cost of one device hour.
    Raises: ConfigError, ModelError with the field that is to blame if it cannot be planned.
    """
    base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
    device = _find_device(sheet or loaded.run.device)
    if sheet and loaded.run.device == "cpu":
        raise ConfigError(
            f"device={sheet} on the command line, and device=cpu ({loaded.where('device')}): leave one out."
        )
    is_this_machine = (sheet or "auto") in RUN_DEVICES
    host_bytes = int(host_gib * GIB) or (room_bytes() if is_this_machine else 0)
    run = loaded.run.model_copy(update={"device": "cuda" if device.is_gpu else "cpu"})

    def forecast_run(candidate: RunConfig, *, is_least: bool = False) -> Forecast:
        return forecast(candidate, base, device, host_free_bytes=host_bytes, where=loaded.where, is_least=is_least)

    choices = list_choices(base) if device.is_gpu and run.gradient_checkpointing == AUTO else ()
    run, chosen = choose_for_memory(run, forecast_run, is_on_gpu=device.is_gpu, choices=choices)
    current = forecast_run(run)
    return Plan(
        current,
        list_findings(current, loaded),
        suggest(current, forecast_run),
        price,
        chosen,
        _find_missing_data(loaded),
    )


def _find_missing_data(loaded: LoadedConfig) -> str | None:
    """Return which data files of the run are not there; None if all are."""
    try:
        check_files_exist(loaded)
    except DataError as error:
        return str(error)
    return None


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
