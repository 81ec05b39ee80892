"""`surefoot plan`: from a config and the name of a device to a forecast, its findings, and settings that fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config import RunConfig, load_config
from surefoot.diagnostics.monitor.processes import room_bytes
from surefoot.errors import ConfigError
from surefoot.findings import Finding
from surefoot.models.resolve_model import resolve_model
from surefoot.planner.devices import DEVICES, GIB, Device, named, this_cpu, this_gpu
from surefoot.planner.forecast import Forecast, forecast
from surefoot.planner.suggest import Changed, ready_to_paste, suggest
from surefoot.planner.text import as_text, findings_of

OF_A_RUN = ("auto", "cpu", "cuda")
"""Values of `device` that a run knows itself."""


@dataclass(frozen=True)
class Plan:
    """What the verb says."""

    forecast: Forecast
    findings: list[Finding]
    changes: list[tuple[Changed, Forecast]]
    price: float

    def as_text(self) -> str:
        return as_text(self.forecast, self.findings, self.changes, self.price)

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.forecast.as_dict(),
            **self._cost(self.forecast),
            "findings": [finding.as_dict() for finding in self.findings],
            "changes": [
                {
                    "settings": changed,
                    "yaml": ready_to_paste(changed),
                    "tokens_per_second": 1 / told.seconds_per_token,
                    "device_peak_bytes": told.device_peak[1],
                    "host_peak_bytes": told.host_peak[1],
                    **self._cost(told),
                }
                for changed, told in self.changes
            ],
        }

    def _cost(self, told: Forecast) -> dict[str, float]:
        """Of a thousand steps; nothing where no price was given."""
        return {"cost_per_1000_steps": told.device_hours(1000) * self.price} if self.price else {}


def plan(config: str, overrides: Sequence[str]) -> Plan:
    """Raises: ConfigError, ModelError for what cannot be planned, with the field that is to blame."""
    ours, rest = _asked(overrides)
    loaded = load_config(config, rest)
    base = resolve_model(loaded.run.model, loaded.where("model"), weights=False)
    device = _device(ours.get("device", loaded.run.device))
    if ours.get("device") and loaded.run.device == "cpu":
        raise ConfigError(
            f"device={ours['device']} on the command line, and device=cpu ({loaded.where('device')}): leave one out."
        )
    is_here = ours.get("device", "auto") in OF_A_RUN
    host_bytes = int(_number(ours, "host_gib") * GIB) or (room_bytes() if is_here else 0)
    run = loaded.run.model_copy(update={"device": "cuda" if device.is_gpu else "cpu"})

    def ask(one: RunConfig, *, is_least: bool = False) -> Forecast:
        return forecast(one, base, device, host_free_bytes=host_bytes, where=loaded.where, is_least=is_least)

    told = ask(run)
    return Plan(told, findings_of(told, loaded), suggest(told, ask), _number(ours, "price"))


def _asked(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(what is asked of the plan, settings of the run)."""
    ours: dict[str, str] = {}
    rest = []
    for one in overrides:
        name, _, value = one.partition("=")
        if name in ("host_gib", "price") or (name == "device" and value not in OF_A_RUN):
            ours[name] = value.lower()
        elif name == "nodes":
            rest += [f"nnodes={value}"]
        else:
            rest.append(one)
    if any(one.startswith("nnodes=") for one in rest) and not any(one.startswith("rdzv_endpoint=") for one in rest):
        rest.append("rdzv_endpoint=node0:29500")  # a plan meets no one
    return ours, rest


def _number(ours: dict[str, str], name: str) -> float:
    try:
        value = float(ours.get(name, "0"))
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(
            f"{name}={ours[name]} is no number from 0 on (command line). Leave it out, or write {name}=2.5."
        )
    return value


def _device(name: str) -> Device:
    """Of a data sheet, or of this machine. Raises: ConfigError."""
    if name not in OF_A_RUN:
        return named(name)
    gpu = this_gpu() if name != "cpu" else None
    if gpu is None and name == "cuda":
        raise ConfigError(f"device=cuda, and no GPU is here: name the one to plan for, device={'|'.join(DEVICES)}.")
    return gpu or this_cpu(room_bytes())
