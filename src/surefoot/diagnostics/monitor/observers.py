"""The diagnostic observers of a rank's events."""

import os
from pathlib import Path

from surefoot.diagnostics.monitor.event_log import Recorder
from surefoot.diagnostics.monitor.evidence_server import record_collectives
from surefoot.events import Observer

FAULT_VARIABLE = "SUREFOOT_FAULT"
"""Variable that a drill sets for its ranks."""


def rank_observers(run_folder: Path, rank: int) -> list[Observer]:
    """Return the recorder with its evidence server; in a drill also the fault injector. Call before the rendezvous."""
    record_collectives()
    observers: list[Observer] = [Recorder(run_folder, rank)]
    if FAULT_VARIABLE in os.environ:
        from surefoot.diagnostics.fault_injection import FaultInjector

        observers.append(FaultInjector(os.environ[FAULT_VARIABLE], rank))
    return observers
