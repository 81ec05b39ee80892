"""What of health hears the events of a rank."""

import os
from pathlib import Path

from surefoot.events import Observer
from surefoot.health.faults import VARIABLE, FaultInjector
from surefoot.health.recorder import Recorder
from surefoot.health.witness import record_collectives


def rank_observers(run_folder: Path, rank: int) -> list[Observer]:
    """The recorder, with a witness; in a drill also the fault. To be called before ranks join each other."""
    record_collectives()
    observers: list[Observer] = [Recorder(run_folder, rank)]
    if VARIABLE in os.environ:
        observers.append(FaultInjector(os.environ[VARIABLE], rank))
    return observers
