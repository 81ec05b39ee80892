"""One rank of a launched run: `python -m surefoot.training.worker`, started by `parallel.launch` with a job to read.

Failures are left as notes for the launcher, which shows the first reason once.
"""

import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from surefoot.config import load_config
from surefoot.errors import InputError, SurefootError
from surefoot.parallel import launch
from surefoot.training.run import train

PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main() -> int:
    """Run the job; returns the exit status. An end that all ranks agreed on is none that elastic should act on."""
    if sys.platform == "linux":  # a launcher that is killed takes its ranks along
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    job = json.loads(Path(os.environ[launch.FOLDER], "job.json").read_text("utf-8"))
    try:
        launch.note_process()
        loaded = load_config(job["config"], job["overrides"], job["settings"])
        if launch.was_begun(loaded.run.run_folder):  # a restart: go on from what the attempt before has saved
            settings = {**job["settings"], "overwrite_output_dir": False, "resume_from_checkpoint": "auto"}
            loaded = load_config(job["config"], job["overrides"], settings)
        train(loaded, screen=job["screen"])
    except SurefootError as error:
        launch.note_failure(error, kind=type(error).__name__, is_agreed=error.is_agreed)
        return 0 if error.is_agreed or isinstance(error, InputError) else error.exit_status
    except BaseException as error:
        if launch.note_failure(error, kind="", is_agreed=False):
            return 1  # the traceback of a rank that only lost its peer would hide the cause
        raise
    return 0


def leave(status: int) -> NoReturn:
    """End this process without the teardown of native threads, in which a rank of a finished run may still abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
