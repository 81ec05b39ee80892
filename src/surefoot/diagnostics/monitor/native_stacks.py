"""Stacks that include the calls of native libraries, taken from outside by py-spy.

Where faulthandler sees one line of Python, these show the kernel launch, the lock or the system call below it. Reading
the symbols of torch takes seconds, so a thread writes them to a file and the finding does not wait for it.
"""

import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

EACH_WITHIN_S = 60.0


def begin_native_stacks(path: Path, processes: Mapping[int, int]) -> tuple[str, threading.Thread]:
    """Start to write the stacks of ranks -> processes to a file, one after the other.

    Returns the text for the evidence, and the thread that writes.

    py-spy stops a process while it reads it. If the kernel forbids that, the file contains the error.
    """
    command = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    thread = threading.Thread(target=_write_stacks, args=(path, processes, command), name="native stacks", daemon=True)
    if command is None:
        return "not recorded: py-spy is not installed (pip install py-spy)", thread
    thread.start()
    return path.name, thread


def _write_stacks(path: Path, processes: Mapping[int, int], command: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            for rank, process in processes.items():
                file.write(f"rank {rank}, process {process}\n{_dump_stacks(command, process)}\n")
                file.flush()
    except OSError:  # a full disk may be the cause of the stall, and the finding reports it
        return


def _dump_stacks(command: str, process: int) -> str:
    """Return the output of py-spy, or the reason why it has none."""
    try:
        result = subprocess.run(
            [command, "dump", "--native", "--pid", str(process)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=EACH_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {EACH_WITHIN_S:.0f} s"
    return result.stdout if result.returncode == 0 else f"py-spy: {result.stderr.strip()}"
