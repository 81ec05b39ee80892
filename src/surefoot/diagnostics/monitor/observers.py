"""What of health hears the events of a rank."""

import os
from pathlib import Path

from surefoot.diagnostics.fault_injection import VARIABLE, FaultInjector
from surefoot.diagnostics.monitor.event_log import Recorder
from surefoot.diagnostics.monitor.evidence_server import record_collectives
from surefoot.events import Observer


def rank_observers(run_folder: Path, rank: int) -> list[Observer]:
    """The recorder, with a witness; in a drill also the fault. To be called before ranks join each other."""
    record_collectives()
    observers: list[Observer] = [Recorder(run_folder, rank)]
    if VARIABLE in os.environ:
        observers.append(FaultInjector(os.environ[VARIABLE], rank))
    return observers
