"""Process of one rank of a launched run: `distributed.elastic_launch` starts it with a job to read.

Failures are left as notes for the launcher, which shows the first reason once.
"""

import json
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from surefoot.config import LoadedConfig
from surefoot.distributed import rank_notes
from surefoot.distributed.elastic_launch import SEEN_WITHIN_S
from surefoot.errors import InputError, SurefootError
from surefoot.system.console import protect_streams
from surefoot.system.process import end_with_parent, handle_stop_signals, leave, without_garbage_collection


def main() -> int:
    """Run the job and return the exit status. Elastic must not act on an end that all ranks agreed on."""
    protect_streams()
    handle_stop_signals()
    end_with_parent()  # when the launcher is killed, its ranks end too
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    try:
        job = json.loads(Path(os.environ[rank_notes.FOLDER], "job.json").read_text("utf-8"))
    except FileNotFoundError:  # the launcher was stopped before this rank had begun
        return 1
    if os.getppid() != job["launcher"]:  # or was killed then: no launcher would start the other ranks
        return 1
    try:
        rank_notes.note_process()
        if "self_test" in job:
            from surefoot.diagnostics.selftest.launch import run_rank

            run_rank(job["self_test"])
            rank_notes.note_end()
            return 0
        with without_garbage_collection():
            from surefoot.diagnostics.monitor.observers import rank_observers
            from surefoot.training.trainer import train

        loaded = LoadedConfig.from_json(job)
        if rank_notes.was_begun(loaded.run.run_folder):  # a restart: go on from the checkpoints of the attempt before
            changes = {"overwrite_output_dir": False, "resume_from_checkpoint": "auto"}
            loaded = replace(loaded, run=loaded.run.model_copy(update=changes))
        observers = rank_observers(loaded.run.run_folder, int(os.environ["RANK"])) if loaded.run.health else []
        train(loaded, observers, screen=job["screen"])
        rank_notes.note_end()
    except SurefootError as error:
        rank_notes.note_failure(error, kind=type(error).__name__, is_agreed=error.is_agreed)
        return 0 if error.is_agreed or isinstance(error, InputError) else error.exit_status
    except BaseException as error:
        if rank_notes.note_failure(error, kind="", is_agreed=False):
            if not isinstance(error, KeyboardInterrupt):
                time.sleep(SEEN_WITHIN_S)  # so that elastic sees the peer's end, and its cause, first
            return 1  # the traceback of a rank that only lost its peer would hide the cause
        raise
    return 0


if __name__ == "__main__":
    leave(main())
