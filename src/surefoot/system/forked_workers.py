"""Worker processes that share what one process has loaded: it loads once, then forks a worker for each pair of pipes.

The parent sends a worker one JSON object a line, and gets one line for each. Workers end when their pipe ends, so they
never outlive the process that started them.
"""

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from surefoot.system.line_pipe import LinePipe
from surefoot.system.process import PYTHON

STATUS_WITHIN_S = 5.0
"""Seconds until the exit status of a worker that has ended must be known."""
Answer = Callable[[Any], dict[str, Any]]
"""Function of a worker that does a job and returns the answer."""


class ForkedWorkers:
    """The parent's side: `pipes` leads to the workers."""

    def __init__(self, module: str, setup: Mapping[str, Any], count: int) -> None:
        """Start `count` workers of `module`, whose `main` calls `fork_workers`. `setup`: what it loads, as JSON."""
        ends = [(os.pipe(), os.pipe()) for _ in range(count)]
        self.pipes = [LinePipe(answers[0], jobs[1]) for jobs, answers in ends]
        inherited = [(jobs[0], answers[1]) for jobs, answers in ends]
        self._loader = subprocess.Popen(
            [*PYTHON, "-m", module, *(f"{jobs},{answers}" for jobs, answers in inherited)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[*chain(*inherited)],
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # this process handles interrupts from the keyboard
        )
        for descriptor in chain(*inherited):
            os.close(descriptor)
        self._loader_pipe = LinePipe.to_process(self._loader)
        with suppress(BrokenPipeError):  # the wait for answers detects and reports its end
            self._loader_pipe.send(json.dumps(setup).encode())

    def find_exit_status(self, number: int) -> int | None:
        """Return the exit status of a worker as reported by the process that forked it, or that process's own."""
        deadline = time.monotonic() + STATUS_WITHIN_S
        with suppress(TimeoutError, EOFError):
            while True:
                report = json.loads(self._loader_pipe.receive(deadline))
                if report["worker"] == number:
                    return int(report["status"])
        return self._loader.poll()

    def kill(self) -> None:
        """Kill the workers: each pipe ends."""
        with suppress(ProcessLookupError):
            os.killpg(self._loader.pid, signal.SIGKILL)
        self._loader.wait(timeout=30)

    def close(self) -> None:
        """Close the pipes, which no thread may use any more."""
        for pipe in self.pipes:
            pipe.close()
        for stream in (self._loader.stdin, self._loader.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def fork_workers(load: Callable[[Any], Answer]) -> None:
    """Load, fork the workers, and report the exit status of those that failed: the `main` of a worker's module.

    `load`: gets the setup of `ForkedWorkers`, and returns what answers a job. It must leave no thread running.
    """
    pairs = [(int(jobs), int(answers)) for jobs, answers in (pair.split(",") for pair in sys.argv[1:])]
    answer = load(json.loads(sys.stdin.readline()))
    _free_memory()
    workers: dict[int, int] = {}
    for number, (jobs, answers) in enumerate(pairs):
        process = os.fork()
        if process == 0:
            for descriptor in {descriptor for pair in pairs[number:] for descriptor in pair} - {jobs, answers}:
                os.close(descriptor)
            with suppress(BrokenPipeError):  # the parent has ended
                LinePipe(jobs, answers).answer_requests(answer)
            os._exit(0)
        os.close(jobs)
        os.close(answers)
        workers[process] = number
    while workers:
        process, status = os.wait()
        number = workers.pop(process)
        if status:
            with suppress(BrokenPipeError):
                print(json.dumps({"worker": number, "status": os.waitstatus_to_exitcode(status)}), flush=True)
    os._exit(0)  # without the teardown of libraries, which may print


def _free_memory() -> None:
    """Free memory before forking: loading a tokenizer takes twice the memory that it needs afterwards."""
    gc.collect()
    gc.freeze()  # collections in the workers would touch, and so copy, shared memory
    with suppress(OSError, AttributeError):  # no GNU C library
        ctypes.CDLL(None).malloc_trim(0)
