"""A run that is supervised: `python -m surefoot.launch.run_process`, which reads its config from standard input.

It trains in this process, or starts the ranks. The supervisor is its parent and reads what it leaves in the run folder.
"""

import json
import os
import sys
import threading
import time

from surefoot.config import LoadedConfig
from surefoot.launch.run_verb import run_verb, train_and_print
from surefoot.system.console import protect_streams
from surefoot.system.process import end_with_parent, own_stop_signals

LEAVE_AFTER_S = 300.0
"""How long a run may take to save and end after its supervisor was killed."""


def main() -> int:
    """Returns the exit status."""
    protect_streams()
    end_with_parent()  # a supervisor that is killed takes the run along
    text = sys.stdin.read()
    if not text:  # it was killed before it could say what to do
        return 1
    said = json.loads(text)
    if os.getppid() != said["supervisor"]:
        return 1
    threading.Thread(target=_end_with, args=(said["supervisor"],), name="parent", daemon=True).start()
    return run_verb(lambda: train_and_print(LoadedConfig.from_json(said), as_json=said["as_json"]))


def _end_with(supervisor: int) -> None:
    """End some time after the supervisor is gone: a run that stands still hears no signal to stop."""
    while os.getppid() == supervisor:
        time.sleep(1.0)
    time.sleep(LEAVE_AFTER_S)
    os._exit(1)


if __name__ == "__main__":
    with own_stop_signals():
        status = main()
    sys.exit(status)
