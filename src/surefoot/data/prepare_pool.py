"""Fills the cache: deals chunks to worker processes, and waits for other processes that prepare the same.

What fails is named: the row, the file or the worker. Small files are prepared at once, without workers.
"""

import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NoReturn

from surefoot import errors
from surefoot.data.cache import CachedFile
from surefoot.data.file_readers import Chunk
from surefoot.data.images import NOT_FETCHED
from surefoot.data.prepare_worker import Preparer, source_as_dict
from surefoot.data.render import RendererSource
from surefoot.data.template_process import TEMPLATE_PROCESS, TOO_LONG
from surefoot.errors import DataError, SurefootError
from surefoot.system.process import PYTHON

SMALL_BYTES = 1 << 20
"""Files that together are smaller are prepared faster than workers start."""
FILES_AT_ONCE = 128
"""Files that are locked, and so held open, at a time."""
CHUNK_DEADLINE_S = 600.0
"""A worker that is silent for so long on one chunk (4096 rows, 4 MiB) is taken for hung."""
POLL_S = 0.05
WAIT_S = 0.5
GROWTH_EVERY_S = 1.0


@dataclass(frozen=True)
class Progress:
    """How far preparing has come, in this process."""

    rows: int
    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left; None while nothing is known."""
        if not self.bytes_done:
            return None
        return self.seconds * (self.bytes_total - self.bytes_done) / self.bytes_done


OnProgress = Callable[[Progress | None], None]
"""Hears how far preparing has come, or None where more is there and another process or thread prepares."""


class Preparation:
    """The preparation of some files under one renderer.

    Chunks are dealt in the order of `first` (pairs of file and chunk), then in the files' order. With `only_waits`,
    another process of this machine prepares.
    """

    def __init__(
        self,
        files: Sequence[CachedFile],
        source: RendererSource,
        *,
        num_workers: int,
        only_waits: bool = False,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        self._files = files
        self._only_waits = only_waits
        self._source = source
        self._num_workers = num_workers
        self._on_progress = on_progress
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._rows = self._bytes = self._bytes_there = 0
        self._began = time.monotonic()
        self._created_ns = time.time_ns()
        self._there, self._next_look_s = 0, 0.0

    @property
    def is_complete(self) -> bool:
        return all(file.is_complete for file in self._files)

    @property
    def is_small(self) -> bool:
        """Whether everything is prepared sooner than workers start."""
        return sum(file.num_bytes for file in self._files) < SMALL_BYTES

    def run(self, first: Sequence[tuple[int, int]] = ()) -> None:
        """Prepare everything that is missing.

        Raises: DataError for data, a template or a worker that fails; StorageError where the disk refuses.
        """
        NOT_FETCHED.clear()  # an address may answer this time
        deadline, there = time.monotonic() + CHUNK_DEADLINE_S, 0
        while not self._stopping.is_set():
            missing = [index for index, file in enumerate(self._files) if not file.is_complete]
            if not missing:
                return
            try:
                free = () if self._only_waits else missing
                locked = islice((index for index in free if self._files[index].try_lock()), FILES_AT_ONCE)
                ours = [index for index in locked if not self._files[index].is_complete]
                if ours:
                    self._prepare(ours, first)
                    deadline = time.monotonic() + CHUNK_DEADLINE_S
            finally:
                for index in missing:
                    self._files[index].unlock()
            if not ours:  # another process prepares them
                self._raise_failure_elsewhere()
                time.sleep(WAIT_S)
                self._tell_growth()
                there, before = self._shards_there(missing), there
                if there > before:
                    deadline = time.monotonic() + CHUNK_DEADLINE_S
                if time.monotonic() > deadline:
                    lock = self._files[missing[0]].recipe.folder / "lock"
                    raise DataError(
                        f"another process holds {lock}, but has prepared nothing for {CHUNK_DEADLINE_S:.0f} s. End it "
                        f"(`fuser {lock}` names it)."
                    )

    def start(self, first: Sequence[tuple[int, int]]) -> None:
        """Prepare in the background; `require` waits for a shard and raises what went wrong."""
        self._thread = threading.Thread(target=self._run_quietly, args=(first,), name="preparation", daemon=True)
        self._thread.start()

    def _raise_failure_elsewhere(self) -> None:
        """Raises: DataError where the process that prepares for this one has failed since this one began."""
        for file in self._files if self._only_waits else ():
            reason = file.failure_since(self._created_ns)
            if reason is not None:
                raise DataError(reason)

    def raise_error(self) -> None:
        """Raises: what the preparation in the background raised."""
        if self._error is not None:
            raise self._error

    def require(self, file: int, chunk: int) -> None:
        """Wait until a shard is there. Raises: what the preparation raised."""
        while not self._files[file].has(chunk):
            self.raise_error()
            self._raise_failure_elsewhere()
            if self._thread is None or not self._thread.is_alive():
                if self._files[file].has(chunk):
                    return
                folder = self._files[file].recipe.folder
                raise self._error or DataError(
                    f"the cache has lost {self._files[file].recipe.shard_path(chunk)}. Delete {folder} and start again."
                )
            time.sleep(POLL_S)
            self._tell_growth()

    def wait(self) -> None:
        """Wait until the preparation in the background is done. Raises: what it raised."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                self._tell_growth()
        self.raise_error()

    def stop(self) -> None:
        """End the workers; what is prepared stays."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=CHUNK_DEADLINE_S)

    def _run_quietly(self, first: Sequence[tuple[int, int]]) -> None:
        try:
            self.run(first)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, by `require`
            self._error = error
            if not self._only_waits:
                for file in self._files:
                    file.note_failure(str(error))

    def _tell_growth(self) -> None:
        """Say that more is there, if so, at most about once a second: who watches this process sees it wait."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + GROWTH_EVERY_S
        there, before = self._shards_there(range(len(self._files))), self._there
        if there > before:
            self._there = there
            self._on_progress(None)

    def _shards_there(self, files: Sequence[int]) -> int:
        return sum(1 for index in files for _ in self._files[index].recipe.folder.glob("*.safetensors"))

    def _prepare(self, ours: Sequence[int], first: Sequence[tuple[int, int]]) -> None:
        self._began = time.monotonic()
        self._bytes_there = sum(file.bytes_there() for file in self._files)
        jobs = _jobs(self._files, ours, first)
        if (self.is_small or self._num_workers == 0) and threading.current_thread() is threading.main_thread():
            preparer = Preparer(self._source)
            try:
                for job in jobs:
                    preparer.prepare(job.file.recipe, job.chunk)
                    self._report(job)
            finally:
                TEMPLATE_PROCESS.end()
        else:
            with _Workers(self._source, max(1, self._num_workers)) as workers:
                for job in workers.run(jobs, self._stopping):
                    self._report(job)
        if not self._stopping.is_set():
            for index in ours:
                self._files[index].complete()

    def _report(self, job: "_Job") -> None:
        self._rows += job.chunk.num_rows
        self._bytes += job.chunk.num_bytes
        total = sum(file.num_bytes for file in self._files) - self._bytes_there
        self._on_progress(Progress(self._rows, self._bytes, total, time.monotonic() - self._began))


@dataclass(frozen=True)
class _Job:
    number: int
    """Of the file."""
    file: CachedFile
    chunk: Chunk


def _jobs(files: Sequence[CachedFile], ours: Sequence[int], first: Sequence[tuple[int, int]]) -> Iterator[_Job]:
    """The chunks of our files that are not prepared yet, in the order in which they are wanted."""
    rest = ((number, chunk.index) for number in ours for chunk in files[number].chunks)
    dealt = set()
    for number, index in chain((pair for pair in first if pair[0] in ours), rest):
        if (number, index) not in dealt and not files[number].has(index):
            dealt.add((number, index))
            yield _Job(number, files[number], files[number].chunks[index])


class _Workers:
    """Worker processes, each with at most two jobs: one in work, one waiting."""

    def __init__(self, source: RendererSource, count: int) -> None:
        self._source = source
        self._count = count
        self._jobs: list[int] = []
        """Descriptor to write a worker's jobs to."""
        self._answers: list[int] = []
        """Descriptor to read a worker's answers from."""
        self._unread: dict[int, bytes] = {}

    def __enter__(self) -> "_Workers":
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        theirs: list[tuple[int, int]] = []
        for _ in range(self._count):
            jobs_end, jobs = os.pipe()
            answers, answers_end = os.pipe()
            self._jobs.append(jobs)
            self._answers.append(answers)
            theirs.append((jobs_end, answers_end))
        self._loader = subprocess.Popen(
            [*PYTHON, "-m", "surefoot.data.prepare_worker", *(f"{jobs},{answers}" for jobs, answers in theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor for pair in theirs for descriptor in pair],
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is for this process to handle
        )
        for pair in theirs:
            for descriptor in pair:
                os.close(descriptor)
        assert self._loader.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen, and named, where answers are awaited
            self._loader.stdin.write(json.dumps(source_as_dict(self._source)).encode() + b"\n")
            self._loader.stdin.flush()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._loader.pid, signal.SIGKILL)
        self._loader.wait(timeout=30)
        for descriptor in (*self._jobs, *self._answers):
            os.close(descriptor)
        for pipe in (self._loader.stdin, self._loader.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def run(self, waiting: Iterator[_Job], stopping: threading.Event) -> Iterator[_Job]:
        """Deal the jobs out; gives each as it is done."""
        at_work: dict[int, dict[tuple[int, int], tuple[_Job, float]]] = {i: {} for i in range(self._count)}
        with selectors.DefaultSelector() as selector:
            for number, descriptor in enumerate(self._answers):
                selector.register(descriptor, selectors.EVENT_READ, number)
            for _ in range(2):
                for number in at_work:
                    self._deal(number, waiting, at_work[number])
            while any(at_work.values()) and not stopping.is_set():
                for key, _ in selector.select(POLL_S):
                    number = key.data
                    for answer in self._read_answers(number, at_work[number]):
                        job, _ = at_work[number].pop((answer["file"], answer["index"]))
                        if "error" in answer:
                            kind, text = answer["error"]
                            raise getattr(errors, kind, SurefootError)(text)
                        yield job
                        self._deal(number, waiting, at_work[number])
                self._check_deadlines(at_work)

    def _read_answers(self, number: int, mine: dict[tuple[int, int], tuple[_Job, float]]) -> list[dict[str, Any]]:
        """Whole lines that a worker has written. Raises: DataError if it is gone."""
        piece = os.read(self._answers[number], 1 << 16)
        if not piece:
            self._died(number, mine)
        *lines, self._unread[number] = (self._unread.get(number, b"") + piece).split(b"\n")
        return [json.loads(line) for line in lines]

    def _deal(self, number: int, waiting: Iterator[_Job], mine: dict[tuple[int, int], tuple[_Job, float]]) -> None:
        job = next(waiting, None)
        if job is None:
            return
        message = {
            "file": job.number,
            "recipe": job.file.recipe.as_dict(),
            "chunk": vars(job.chunk),
        }
        mine[job.number, job.chunk.index] = (job, time.monotonic())
        with suppress(BrokenPipeError):  # its end is seen, and named, where its answer is awaited
            os.write(self._jobs[number], json.dumps(message).encode() + b"\n")

    def _died(self, number: int, mine: dict[tuple[int, int], tuple[_Job, float]]) -> NoReturn:
        status = self._status_of(number)
        how = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        advice = "start again, with fewer dataset_num_proc if memory is short" if status == -9 else "start again"
        if not mine:
            raise DataError(f"a worker process that had nothing to prepare {how}. What was prepared is kept; {advice}.")
        job, _ = next(iter(mine.values()))
        if status == -TOO_LONG:
            raise DataError(
                f"{job.file.recipe.name}: the chat template takes too long for a row of chunk {job.chunk.index} (rows "
                f"from {job.chunk.first_row + 1} on): an endless loop? Give another one with chat_template."
            )
        raise DataError(
            f"{job.file.recipe.name}: a worker process {how} while it prepared chunk {job.chunk.index}"
            f" (rows from {job.chunk.first_row + 1} on). What was prepared is kept; {advice}."
        )

    def _status_of(self, number: int) -> int | None:
        """The exit status of a worker as the process that started it tells, or that process's own."""
        assert self._loader.stdout is not None
        deadline = time.monotonic() + 10
        told = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._loader.stdout, selectors.EVENT_READ)
            while time.monotonic() < deadline and selector.select(1):
                piece = os.read(self._loader.stdout.fileno(), 1 << 16)
                if not piece:
                    break
                told += piece
                for line in told.splitlines():
                    said = json.loads(line)
                    if said["worker"] == number:
                        return int(said["status"])
        return self._loader.poll()

    def _check_deadlines(self, at_work: dict[int, dict[tuple[int, int], tuple[_Job, float]]]) -> None:
        for mine in at_work.values():
            for job, began in list(mine.values())[:1]:
                if time.monotonic() - began > 2 * CHUNK_DEADLINE_S:
                    raise DataError(
                        f"{job.file.recipe.name}: preparing chunk {job.chunk.index} "
                        f"(rows from {job.chunk.first_row + 1} on) took over "
                        f"{2 * CHUNK_DEADLINE_S:.0f} s. Is the chat template very slow, or the machine overloaded?"
                    )
