"""One rank of a launched run: `python -m surefoot.worker`, started by `parallel.launch` with a job to read.

Failures are left as notes for the launcher, which shows the first reason once.
"""

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from surefoot.config import LoadedConfig
from surefoot.errors import InputError, SurefootError
from surefoot.health.observers import rank_observers
from surefoot.parallel import launch
from surefoot.process_end import end_with_parent, handle_stop_signals, leave
from surefoot.self_test.start import run_rank
from surefoot.terminal import protect_streams
from surefoot.training.run import train


def main() -> int:
    """Run the job; returns the exit status. An end that all ranks agreed on is none that elastic should act on."""
    protect_streams()
    handle_stop_signals()
    end_with_parent()  # a launcher that is killed takes its ranks along
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    try:
        job = json.loads(Path(os.environ[launch.FOLDER], "job.json").read_text("utf-8"))
    except FileNotFoundError:  # the launcher was stopped before this rank had begun
        return 1
    if os.getppid() != job["launcher"]:  # or was killed then: it leaves no one who would start the others
        return 1
    try:
        launch.note_process()
        if "self_test" in job:
            run_rank(job["self_test"])
            launch.note_end()
            return 0
        loaded = LoadedConfig.from_json(job)
        if launch.was_begun(loaded.run.run_folder):  # a restart: go on from what the attempt before has saved
            changes = {"overwrite_output_dir": False, "resume_from_checkpoint": "auto"}
            loaded = replace(loaded, run=loaded.run.model_copy(update=changes))
        observers = rank_observers(loaded.run.run_folder, int(os.environ["RANK"])) if loaded.run.health else []
        train(loaded, observers, screen=job["screen"])
        launch.note_end()
    except SurefootError as error:
        launch.note_failure(error, kind=type(error).__name__, is_agreed=error.is_agreed)
        return 0 if error.is_agreed or isinstance(error, InputError) else error.exit_status
    except BaseException as error:
        if launch.note_failure(error, kind="", is_agreed=False):
            if not isinstance(error, KeyboardInterrupt):
                time.sleep(launch.SEEN_WITHIN_S)  # so that elastic sees the peer's end, and how it ended, first
            return 1  # the traceback of a rank that only lost its peer would hide the cause
        raise
    return 0


if __name__ == "__main__":
    leave(main())
