"""Stacks with the calls of native libraries in them, taken from outside by py-spy: where faulthandler sees one line of
Python, these show the kernel launch, the lock or the system call below it.

Reading the symbols of torch takes seconds, so they are written beside the finding and not waited for.
"""

import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

EACH_WITHIN_S = 60.0


def begin_native_stacks(path: Path, processes: Mapping[int, int]) -> tuple[str, threading.Thread]:
    """Begin to write the stacks of ranks -> processes into a file, one after the other.

    Returns what is to be said, and the thread that writes.

    py-spy stops a process for the moment in which it looks. Where the kernel does not allow that, the file says so.
    """
    command = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    thread = threading.Thread(target=_write, args=(path, processes, command), name="native stacks", daemon=True)
    if command is None:
        return "py-spy is not installed", thread
    thread.start()
    return path.name, thread


def _write(path: Path, processes: Mapping[int, int], command: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            for rank, process in processes.items():
                file.write(f"rank {rank}, process {process}\n{_dump(command, process)}\n")
                file.flush()
    except OSError:  # a full disk may be the cause of the stall; what was found says so
        return


def _dump(command: str, process: int) -> str:
    """What py-spy says, or why it says nothing."""
    try:
        done = subprocess.run(
            [command, "dump", "--native", "--pid", str(process)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=EACH_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {EACH_WITHIN_S:.0f} s"
    return done.stdout if done.returncode == 0 else f"py-spy: {done.stderr.strip()}"
