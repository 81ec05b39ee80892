"""The process of a supervised run: `python -m surefoot.launch.run_process` reads its config from standard input.

It trains in this process, or starts the ranks. Its parent is the supervisor, which reads the run folder.
"""

import json
import os
import sys
import threading
import time
import traceback

from surefoot.config import LoadedConfig
from surefoot.launch.run_verb import CRASHED, run_verb, train_and_print
from surefoot.system.console import protect_streams, report_lost_output
from surefoot.system.process import end_with_parent, own_stop_signals

LEAVE_AFTER_S = 300.0
"""Seconds that a run may take to save and end after its supervisor was killed."""


def main() -> int:
    """Run to the end; return the exit status."""
    protect_streams()
    end_with_parent()  # when the supervisor is killed, this process receives SIGTERM
    text = sys.stdin.read()
    if not text:  # the supervisor was killed before it sent the config
        return 1
    request = json.loads(text)
    if os.getppid() != request["supervisor"]:
        return 1
    threading.Thread(target=_end_after, args=(request["supervisor"],), name="parent", daemon=True).start()
    try:
        status = run_verb(lambda: train_and_print(LoadedConfig.from_json(request), as_json=request["as_json"]))
    except Exception:  # noqa: BLE001 - the supervisor must tell it from an error that the run raised on purpose
        traceback.print_exc()
        status = CRASHED
    return report_lost_output(status)


def _end_after(supervisor: int) -> None:
    """End this process some time after the supervisor ended: a stalled run handles no signal to stop."""
    while os.getppid() == supervisor:
        time.sleep(1.0)
    time.sleep(LEAVE_AFTER_S)
    os._exit(1)


if __name__ == "__main__":
    with own_stop_signals():
        status = main()
    sys.exit(status)
