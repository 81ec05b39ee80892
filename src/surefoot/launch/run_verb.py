"""Wrapper of the commands of the command line that turns errors into a line and an exit status."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import surefoot
from surefoot.errors import InputError, StoppedOnFinding, SurefootError
from surefoot.system import allocators
from surefoot.system.added_variables import add_variables
from surefoot.system.console import print_json, say, write

if TYPE_CHECKING:
    from surefoot.config import LoadedConfig, RunConfig

DONE, FAILED = 0, 1
CRASHED = 70
"""Exit status of a supervised run that an unexpected error ended. Its supervisor exits with `FAILED` instead."""
IMPOSSIBLE_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of the file system for a name that no file can have."""
REFUSED_BY_SYSTEM = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENOMEM, errno.EMFILE,
    errno.EAGAIN, errno.EFBIG,
)  # fmt: skip
"""Errors caused by the machine: a full disk, a lost mount, no process left."""


def run_verb(verb: Callable[[], int]) -> int:
    """Call a command and turn its errors into a line and an exit status."""
    # Large pages for large tensors: fewer faults when activations come and go. Read once, when torch is loaded.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Numbers of GPUs are then those of nvidia-smi and NVML, from which samples and findings are.
    add_variables({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    if not allocators.allocator_settings():  # steps differ in size: free memory would end up in pieces
        add_variables({allocators.VARIABLES[0]: allocators.EXPANDABLE})
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    try:
        Path.cwd()
    except FileNotFoundError:
        say("error: the current folder does not exist any more. Change to one that does, then try again.")
        return InputError.exit_status
    try:
        return verb()
    except SurefootError as error:
        is_said = error.is_agreed and os.environ.get("RANK", "0") != "0"  # by rank 0
        if not is_said and not isinstance(error, StoppedOnFinding):  # a finding was shown when it was created
            say(f"error: {error}")
        return error.exit_status
    except PermissionError as error:  # any file: only the user can change its permissions
        say(f"error: {error.filename or 'a file'}: {error.strerror}. Give this user the right to read it.")
        return InputError.exit_status
    except OSError as error:
        if error.errno not in (*IMPOSSIBLE_PATH, *REFUSED_BY_SYSTEM):
            raise
        name = f"{error.filename!s:.80}: " if error.filename is not None else ""
        say(f"error: {name}{error.strerror}.")
        return InputError.exit_status if error.errno in IMPOSSIBLE_PATH else FAILED
    except KeyboardInterrupt:
        say("interrupted")
        return FAILED


def train_and_print(loaded: "LoadedConfig", *, as_json: bool) -> int:
    """Run to the end and print the result; return the exit status."""
    result = surefoot.train_loaded(loaded)
    if os.environ.get("RANK", "0") != "0":
        pass  # one of several ranks: rank 0 prints
    elif as_json:
        print_json(result.as_dict())
    else:
        speed = f", {result.tokens_per_second:.0f} tok/s" if result.tokens_per_second else ""
        loss = f", train_loss {result.train_loss:.4f}" if result.train_loss is not None else ""
        loss += f", eval_loss {result.evaluation['eval_loss']:.4f}" if "eval_loss" in result.evaluation else ""
        place = f"artifact: {result.artifact}" if result.artifact else f"run folder: {result.run_folder}"
        steps = f"{result.steps} step{'s' * (result.steps != 1)}"
        write(sys.stdout, f"{result.status} after {steps}{loss}{speed}\n{place}\n")
        if result.status == "interrupted" and result.steps:
            write(sys.stdout, f"{_describe_resuming(loaded.run)}\n")
    return DONE if result.status == "completed" else FAILED


def _describe_resuming(run: "RunConfig") -> str:
    """Return the sentence that says how an interrupted run is resumed."""
    changes = ["overwrite_output_dir=false"] if run.overwrite_output_dir else []
    changes += ["resume_from_checkpoint=auto"] if run.resume_from_checkpoint != "auto" else []
    warning = ". Without that it deletes this run" if run.overwrite_output_dir else ""
    return f"the same command{' with ' if changes else ''}{' '.join(changes)} resumes the run{warning}"
