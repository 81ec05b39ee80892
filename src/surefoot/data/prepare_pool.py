"""The preparation pool: deals chunks to worker processes, and waits for other processes that prepare the same files.

Errors name the row, the file or the worker. Small files are prepared in this process, without workers.
"""

import json
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any

from surefoot import errors
from surefoot.data.cache import CachedFile
from surefoot.data.file_readers import Chunk
from surefoot.data.images import NOT_FETCHED
from surefoot.data.prepare_worker import Preparer
from surefoot.data.renderer_source import RendererSource
from surefoot.data.template_process import TEMPLATE_PROCESS
from surefoot.errors import DataError, SurefootError
from surefoot.system.compute_limits import STUCK_SIGNAL
from surefoot.system.console import format_time_left
from surefoot.system.forked_workers import ForkedWorkers
from surefoot.system.line_pipe import LinePipe

SMALL_BYTES = 1 << 20
"""Total file size below which preparing is faster than starting workers."""
FILES_AT_ONCE = 128
"""Number of files that are locked, and so held open, at a time."""
CHUNK_DEADLINE_S = 600.0
"""Silence on one chunk (4096 rows, 4 MiB) after which a worker counts as hung."""
POLL_S = 0.05
WAIT_S = 0.5
GROWTH_EVERY_S = 1.0


@dataclass(frozen=True)
class Progress:
    """Progress of preparation in this process."""

    rows: int
    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds left; None without an estimate."""
        if not self.bytes_done:
            return None
        return self.seconds * (self.bytes_total - self.bytes_done) / self.bytes_done

    def as_text(self) -> str:
        """Return a line for the console."""
        share = eta = ""
        if self.eta_s is not None:
            done = self.bytes_done / self.bytes_total
            share = f"[{'#' * round(20 * done):.<20}] {done:.0%}, "
            eta = f", ETA {format_time_left(self.eta_s)}"
        return f"preparing data: {share}{self.rows} rows, {self.rows_per_second:.0f} rows/s{eta}"


OnProgress = Callable[[Progress | None], None]
"""Callback with the progress; None means that another process or thread prepares and has written more shards."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of the preparation in this process."""

    num_workers: int = 0
    only_waits: bool = False
    """Whether another process of this machine prepares, and this one waits for its shards."""
    on_progress: OnProgress = lambda _: None


class Preparation:
    """The preparation of files with one renderer.

    Chunks are dealt in the order of `first` (pairs of file and chunk), then in the files' order.
    """

    def __init__(self, files: Sequence[CachedFile], source: RendererSource, options: PrepareOptions) -> None:
        self._files = files
        self._source = source
        self._only_waits = options.only_waits
        self._num_workers = options.num_workers
        self._on_progress = options.on_progress
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._rows = self._bytes = self._cached_bytes = 0
        self._began = time.monotonic()
        self._created_ns = time.time_ns()
        self._num_shards, self._next_report_s, self._last_growth_s = 0, 0.0, 0.0

    @property
    def is_complete(self) -> bool:
        return all(file.is_complete for file in self._files)

    @property
    def is_small(self) -> bool:
        """Whether preparing everything is faster than starting workers."""
        return sum(file.num_bytes for file in self._files) < SMALL_BYTES

    def run(self, first: Sequence[tuple[int, int]] = ()) -> None:
        """Prepare everything that is missing.

        Raises: DataError for data, a template or a worker that fails; StorageError where writing fails.
        """
        NOT_FETCHED.clear()  # a download may succeed this time
        self._last_growth_s = time.monotonic()
        while not self._stopping.is_set():
            missing = [index for index, file in enumerate(self._files) if not file.is_complete]
            if not missing:
                return
            try:
                free = () if self._only_waits else missing
                locked = islice((index for index in free if self._files[index].try_lock()), FILES_AT_ONCE)
                incomplete = [index for index in locked if not self._files[index].is_complete]
                if incomplete:
                    self._prepare_files(incomplete, first)
                    self._last_growth_s = time.monotonic()
            finally:
                for index in missing:
                    self._files[index].unlock()
            if not incomplete:  # another process prepares them
                self._raise_remote_failure()
                time.sleep(WAIT_S)
                self._report_growth()
                if time.monotonic() - self._last_growth_s > CHUNK_DEADLINE_S:
                    lock = self._files[missing[0]].recipe.folder / "lock"
                    raise DataError(
                        f"another process holds {lock}, but has prepared nothing for {CHUNK_DEADLINE_S:.0f} s. End it "
                        f"(`fuser {lock}` names it)."
                    )

    def start(self, first: Sequence[tuple[int, int]]) -> None:
        """Prepare in the background; `require` waits for a shard and raises errors."""
        self._thread = threading.Thread(target=self._run_in_thread, args=(first,), name="preparation", daemon=True)
        self._thread.start()

    def _raise_remote_failure(self) -> None:
        """Raise DataError if the process that prepares for this one has failed since this one began."""
        for file in self._files if self._only_waits else ():
            reason = file.failure_since(self._created_ns)
            if reason is not None:
                raise DataError(reason)

    def raise_error(self) -> None:
        """Raise the error of the background preparation, if it failed."""
        if self._error is not None:
            raise self._error

    def require(self, file: int, chunk: int) -> None:
        """Wait until a shard exists. Raises: the error of the preparation."""
        while not self._files[file].has(chunk):
            self.raise_error()
            self._raise_remote_failure()
            if self._thread is None or not self._thread.is_alive():
                if self._files[file].has(chunk):
                    return
                folder = self._files[file].recipe.folder
                raise self._error or DataError(
                    f"the cache has lost {self._files[file].recipe.shard_path(chunk)}. Delete {folder} and start again."
                )
            time.sleep(POLL_S)
            self._report_growth()

    def wait(self) -> None:
        """Wait until the background preparation is done. Raises: its error."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                self._report_growth()
        self.raise_error()

    def stop(self) -> None:
        """Stop the workers; finished shards stay."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=CHUNK_DEADLINE_S)

    def _run_in_thread(self, first: Sequence[tuple[int, int]]) -> None:
        try:
            self.run(first)
        except BaseException as error:  # noqa: BLE001 - `require` raises it in the waiting thread
            self._error = error
            if not self._only_waits:
                for file in self._files:
                    file.note_failure(str(error))

    def _report_growth(self) -> None:
        """Report new shards, at most about once a second, so that a monitor of this process sees that it waits."""
        if time.monotonic() < self._next_report_s:
            return
        self._next_report_s = time.monotonic() + GROWTH_EVERY_S
        num_shards = sum(1 for file in self._files for _ in file.recipe.folder.glob("*.safetensors"))
        if num_shards > self._num_shards:
            self._num_shards, self._last_growth_s = num_shards, time.monotonic()
            self._on_progress(None)

    def _prepare_files(self, incomplete: Sequence[int], first: Sequence[tuple[int, int]]) -> None:
        self._began = time.monotonic()
        self._cached_bytes = sum(file.count_cached_bytes() for file in self._files)
        jobs = _list_jobs(self._files, incomplete, first)
        if (self.is_small or self._num_workers == 0) and threading.current_thread() is threading.main_thread():
            preparer = Preparer(self._source)
            try:
                for job in jobs:
                    preparer.prepare(job.file.recipe, job.chunk)
                    self._report_job(job)
            finally:
                TEMPLATE_PROCESS.end()
        else:
            with _WorkerPool(self._source, max(1, self._num_workers)) as workers:
                for job in workers.run(jobs, self._stopping):
                    self._report_job(job)
        if not self._stopping.is_set():
            for index in incomplete:
                self._files[index].complete()

    def _report_job(self, job: "_Job") -> None:
        self._rows += job.chunk.num_rows
        self._bytes += job.chunk.num_bytes
        total = sum(file.num_bytes for file in self._files) - self._cached_bytes
        self._on_progress(Progress(self._rows, self._bytes, total, time.monotonic() - self._began))


@dataclass(frozen=True)
class _Job:
    """A chunk to prepare."""

    file: CachedFile
    chunk: Chunk
    sent_s: float = 0.0
    """Time at which a worker got it, on the monotonic clock."""

    def __str__(self) -> str:
        return f"chunk {self.chunk.index} (rows from {self.chunk.first_row + 1} on)"


def _list_jobs(
    files: Sequence[CachedFile], incomplete: Sequence[int], first: Sequence[tuple[int, int]]
) -> Iterator[_Job]:
    """Yield the missing chunks of the locked files, those of `first` before the rest."""
    rest = ((number, chunk.index) for number in incomplete for chunk in files[number].chunks)
    dealt = set()
    for number, index in chain((pair for pair in first if pair[0] in incomplete), rest):
        if (number, index) not in dealt and not files[number].has(index):
            dealt.add((number, index))
            yield _Job(files[number], files[number].chunks[index])


@dataclass
class _Worker:
    """A worker process as its pipe, and the jobs that it has not answered yet, in the order of its answers."""

    pipe: LinePipe
    jobs: deque[_Job] = field(default_factory=deque)


class _WorkerPool:
    """A pool of worker processes, each with at most two jobs: one in progress, one queued."""

    def __init__(self, source: RendererSource, count: int) -> None:
        self._source = source
        self._count = count

    def __enter__(self) -> "_WorkerPool":
        self._processes = ForkedWorkers("surefoot.data.prepare_worker", asdict(self._source), self._count)
        self._workers = [_Worker(pipe) for pipe in self._processes.pipes]
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.kill()
        self._processes.close()

    def run(self, waiting: Iterator[_Job], stopping: threading.Event) -> Iterator[_Job]:
        """Deal out the jobs; yield each when it is done."""
        with selectors.DefaultSelector() as selector:
            for number, worker in enumerate(self._workers):
                selector.register(worker.pipe.incoming, selectors.EVENT_READ, number)
            for worker in self._workers * 2:
                self._send_job(worker, waiting)
            while any(worker.jobs for worker in self._workers) and not stopping.is_set():
                for key, _ in selector.select(POLL_S):
                    for answer in self._read_answers(key.data):
                        job = self._workers[key.data].jobs.popleft()
                        if "error" in answer:
                            kind, text = answer["error"]
                            raise getattr(errors, kind, SurefootError)(text)
                        yield job
                        self._send_job(self._workers[key.data], waiting)
                self._check_deadlines()

    def _read_answers(self, number: int) -> list[dict[str, Any]]:
        """Return the answers of a worker that are complete. Raises: DataError if it has ended."""
        worker = self._workers[number]
        try:
            return [json.loads(line) for line in worker.pipe.receive_available()]
        except EOFError:
            status = self._processes.find_exit_status(number)
        how = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        advice = "start again, with fewer dataset_num_proc if memory is short" if status == -9 else "start again"
        if not worker.jobs:
            raise DataError(f"a worker process that had nothing to prepare {how}. What was prepared is kept; {advice}.")
        job = worker.jobs[0]
        if status == -STUCK_SIGNAL:
            raise DataError(
                f"{job.file.recipe.name}: the chat template takes too long for a row of {job}: an endless loop? Give "
                "another one with chat_template."
            )
        raise DataError(
            f"{job.file.recipe.name}: a worker process {how} while it prepared {job}. What was prepared is kept; "
            f"{advice}."
        )

    def _send_job(self, worker: _Worker, waiting: Iterator[_Job]) -> None:
        job = next(waiting, None)
        if job is None:
            return
        worker.jobs.append(replace(job, sent_s=time.monotonic()))
        message = {"recipe": asdict(job.file.recipe), "chunk": asdict(job.chunk)}
        with suppress(BrokenPipeError):  # the wait for answers detects and reports its end
            worker.pipe.send(json.dumps(message, default=str).encode())

    def _check_deadlines(self) -> None:
        for job in (worker.jobs[0] for worker in self._workers if worker.jobs):
            if time.monotonic() - job.sent_s > 2 * CHUNK_DEADLINE_S:
                raise DataError(
                    f"{job.file.recipe.name}: preparing {job} took over {2 * CHUNK_DEADLINE_S:.0f} s. Is the chat "
                    "template very slow, or the machine overloaded?"
                )
