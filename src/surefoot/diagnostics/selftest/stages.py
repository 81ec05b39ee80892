"""One rank of a self-test: it runs the stages in a thread, and rank 0 watches the progress of every rank.

A stage that hangs can be detected but not ended, so processes exit when rank 0 reports that the test is over. Results
go over the launcher's store, because the network between the ranks is under test.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from surefoot.diagnostics.selftest import collectives, connectivity
from surefoot.diagnostics.selftest.results import Report, checks_of
from surefoot.distributed.listening import is_one_machine
from surefoot.distributed.process_group import gpu_of
from surefoot.distributed.store import shared_store
from surefoot.errors import ConfigError, StoppedOnFinding, one_line
from surefoot.system.loopback import kept_on_this_machine
from surefoot.system.machine_snapshot import collect, existing_folder
from surefoot.system.nvml import read_visible

LOOK_EVERY_S = 0.05
AFTER_AN_ERROR_S = 3.0
"""Seconds to wait for the other ranks once a rank has failed."""
CONNECT_WITHIN = timedelta(seconds=120)
"""Longest time to connect to the launcher's store."""
LEAVE_WITHIN_S = 10.0
WRITTEN_BYTES = 64 << 20
OVER = "over"
"""Store key that rank 0 sets to the exit status when the test is over."""


@dataclass
class RankContext:
    """State of a rank, including what its stages leave for later ones."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    output_dir: Path | None
    rdzv_endpoint: str | None
    store: Any
    firsts: list[int] = field(default_factory=list)
    """First rank of each machine."""
    listener: connectivity.Listener | None = None

    @property
    def is_first_here(self) -> bool:
        return self.local_rank == 0

    def reached(self, stage: str, part: int) -> None:
        """Publish the progress of this rank, so that the rank that holds up the others can be named."""
        self.store.set(f"at/{stage}/{self.rank}", str(part))


@dataclass(frozen=True)
class Stage:
    """One operation that all ranks perform."""

    name: str
    work: Callable[[RankContext], Any]
    within_s: float
    """Deadline in seconds after all ranks have completed the previous stage."""


def _arrive(context: RankContext) -> Any:
    context.store.set(f"first/{context.rank}", str(int(context.is_first_here)))


def _collect_snapshot(context: RankContext) -> Any:
    """Collect a rank's snapshot: variables and versions belong to its process, the rest to the machine."""
    is_first = context.is_first_here
    snapshot = collect(
        context.output_dir if is_first else None,
        context.rdzv_endpoint if is_first else None,
        patient=True,
        gpus=is_first,
    )
    device = ""
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
        device = torch.cuda.get_device_name(context.device)
    return {**snapshot.as_dict(), "local_rank": context.local_rank, "device": device}


def _measure_clock_offset(context: RankContext) -> Any:
    if context.rank == 0:
        firsts = [rank for rank in range(context.size) if int(context.store.get(f"first/{rank}"))]
        context.store.set("firsts", json.dumps(firsts))
    context.firsts = json.loads(context.store.get("firsts"))
    if context.rank == 0:
        connectivity.answer_pings(context.store, context.firsts[1:])
    elif context.is_first_here:
        return connectivity.offset_s(context.store, context.rank)
    return [0.0, 0.0]


def _connect_machines(context: RankContext) -> Any:
    """Connect from each machine to each other one. Returns rank -> why it was not reached."""
    if not context.is_first_here or len(context.firsts) == 1:
        return {}
    addresses = connectivity.listening_addresses(os.environ, context.rdzv_endpoint)
    context.listener = connectivity.Listener(context.rank, addresses)
    context.store.set(f"listens/{context.rank}", json.dumps(context.listener.places))
    others = {
        other: json.loads(context.store.get(f"listens/{other}")) for other in context.firsts if other != context.rank
    }
    return {str(other): problem for other, problem in connectivity.connect_to_all(others).items() if problem}


def _join_process_group(context: RankContext) -> Any:
    """Join the process group as a run does, and return the NCCL that was loaded."""
    dist.init_process_group(
        "nccl" if context.device.type == "cuda" else "gloo",
        store=PrefixStore("group", context.store),
        rank=context.rank,
        world_size=context.size,
        timeout=GROUP_TIMEOUT,
        device_id=context.device if context.device.type == "cuda" else None,
    )
    dist.barrier()
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl" in line]
    version = ".".join(str(part) for part in torch.cuda.nccl.version()) if context.device.type == "cuda" else ""
    return {"nccl": version, "loaded": sorted(set(loaded))}


def _exchange_pairs(context: RankContext) -> Any:
    return collectives.exchange(
        context.rank, context.size, context.device, lambda part: context.reached("exchange", part)
    )


def _run_collectives(context: RankContext) -> Any:
    return collectives.collectives(
        context.rank, context.size, context.device, lambda part: context.reached("collectives", part)
    )


def _measure_bandwidth(context: RankContext) -> Any:
    return collectives.bandwidth(context.size, context.device)


def _measure_product(context: RankContext) -> Any:
    speed, gpu = collectives.product(context.device, lambda: _read_gpu(context.device))
    return {"tflops": speed, "card": gpu}


def _read_gpu(device: torch.device) -> dict[str, Any] | None:
    """Return what NVML reports about a rank's GPU now, or None if it reports nothing."""
    if device.type != "cuda":
        return None
    try:
        gpu = read_visible(device.index or 0)
    except Exception:  # noqa: BLE001 - no NVML here: the doctor's own checks report why
        return None
    return asdict(gpu) if gpu is not None else None


def _measure_storage(context: RankContext) -> Any:
    """Measure the speed of a large file in output_dir, MB/s: written and synced, then read from the disk."""
    if context.output_dir is None or not context.is_first_here:
        return None
    data = os.urandom(WRITTEN_BYTES)
    path = existing_folder(context.output_dir) / f".surefoot-probe-{context.rank}-{os.getpid()}.tmp"
    with open(path, "w+b") as file:
        path.unlink()  # whatever ends this process, nothing is left behind
        began_s = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written_s = time.perf_counter() - began_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        file.seek(0)
        is_same = file.read() == data
        read_s = time.perf_counter() - began_s
    return {"write": WRITTEN_BYTES / written_s / 1e6, "read": WRITTEN_BYTES / read_s / 1e6, "is_same": is_same}


DEEP_WITHIN_S = 60.0
GROUP_TIMEOUT = timedelta(hours=1)
"""Longer than any deadline of a stage: a collective that times out fails at the rank that waits."""
COMPARISON_STAGES = (
    Stage("arrive", _arrive, 180.0),
    Stage("machine", _collect_snapshot, 60.0),
    Stage("clock", _measure_clock_offset, 30.0),
    Stage("reach", _connect_machines, 60.0),
)
"""Stages that can run on any machine at any time."""
DEEP = (
    Stage("join", _join_process_group, DEEP_WITHIN_S),
    Stage("exchange", _exchange_pairs, DEEP_WITHIN_S),
    Stage("collectives", _run_collectives, DEEP_WITHIN_S),
    Stage("bandwidth", _measure_bandwidth, 2 * DEEP_WITHIN_S),
)
"""Stages that load the devices and the network."""
SINGLE_PROCESS = (Stage("product", _measure_product, 30.0), Stage("storage", _measure_storage, 60.0))
"""Stages that each rank runs by itself."""


def longest_s(stages: Sequence[Stage]) -> float:
    """Return the seconds after which a test of these stages is over in any case."""
    return sum(stage.within_s for stage in stages) + 2 * LEAVE_WITHIN_S


def stages_of(size: int, *, is_deep: bool) -> Sequence[Stage]:
    """Return the stages for `size` ranks."""
    return (*COMPARISON_STAGES, *(DEEP if is_deep and size > 1 else ()), *(SINGLE_PROCESS if is_deep else ()))


@dataclass(frozen=True)
class Task:
    """Arguments of a rank, JSON-compatible."""

    device: str
    output_dir: str | None
    rdzv_endpoint: str | None
    report: str
    """Path to which rank 0 writes the report after each stage."""
    is_deep: bool


def try_out(task: Task, stages: Sequence[Stage] | None = None) -> tuple[Report | None, int]:
    """Run the stages with the other ranks that the launcher's environment names.

    Returns (the report at rank 0, None at others; the exit status that rank 0 chose). A thread may still hang in a
    stage: the caller must exit by `process.leave`.
    Raises: ConfigError for an environment that does not fit, or a store that does not answer.
    """
    rank, size, local_rank = _read_rank_environment()
    device = gpu_of(rank, local_rank) if task.device == "cuda" else torch.device("cpu")
    chosen = stages_of(size, is_deep=task.is_deep) if stages is None else stages
    try:
        working = PrefixStore("self-test", shared_store(rank, size, CONNECT_WITHIN))
        # A second client, because the first may be blocked in a request.
        watching = PrefixStore("self-test", shared_store(-1, size, CONNECT_WITHIN))
    except RuntimeError as error:
        raise ConfigError(
            f"rank {rank}: no answer from {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, where rank 0 or "
            f"its launcher should be: {one_line(error)}. Was rank 0 started, and is its machine reached?"
        ) from error
    output_dir = Path(task.output_dir) if task.output_dir is not None else None
    context = RankContext(rank, size, local_rank, device, output_dir, task.rdzv_endpoint, working)
    report = Report(size, "nccl" if task.device == "cuda" else "gloo")
    path = Path(task.report)
    watchdog = threading.Timer(longest_s(chosen), _abort_test, (report, path, chosen, rank))
    watchdog.daemon = True
    watchdog.start()  # for a store that no longer answers: its requests have no deadline
    with kept_on_this_machine(is_needed=is_one_machine(size)):
        threading.Thread(target=_run_stages, args=(context, chosen), name="stages", daemon=True).start()
        status = (
            _lead_stages(report, chosen, watching, path)
            if rank == 0
            else _wait_for_rank0(rank, watching, longest_s(chosen))
        )
    watchdog.cancel()
    return (report if rank == 0 else None), status


def _read_rank_environment() -> tuple[int, int, int]:
    """Return (rank, size, local rank) from the environment. Raises: ConfigError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"this process is not a rank of a launcher: {', '.join(missing)} is not set.")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def _lead_stages(report: Report, stages: Sequence[Stage], store: Any, path: Path) -> int:
    """Watch all ranks run the stages, at rank 0, and publish the exit status."""
    for stage in stages:
        if not _watch_stage(stage, report, store):
            break
        report.write(path)
    is_failed = any(check.status == "failed" for check in checks_of(report))
    status = StoppedOnFinding.exit_status if is_failed else 0
    store.set(OVER, str(status))
    report.is_over = True
    report.write(path)
    others = [f"left/{other}" for other in range(1, report.ranks) if other not in report.silent]
    _wait_until(lambda: not others or store.check(others), LEAVE_WITHIN_S)  # this process may host the store
    return status


def _wait_for_rank0(rank: int, store: Any, within_s: float) -> int:
    """Wait, at any other rank, until rank 0 reports that the test is over. Returns its exit status."""
    _wait_until(lambda: store.check([OVER]), within_s)
    with suppress(RuntimeError):  # rank 0 has exited
        if store.check([OVER]):
            store.set(f"left/{rank}", "")
            return int(store.get(OVER))
    return StoppedOnFinding.exit_status


def _abort_test(report: Report, path: Path, stages: Sequence[Stage], rank: int) -> None:
    if rank == 0:
        report.stopped_in = report.stopped_in or next((s.name for s in stages if s.name not in report.by_stage), "")
        report.write(path)
    os._exit(1)


def _run_stages(context: RankContext, stages: Sequence[Stage]) -> None:
    for stage in stages:
        try:
            response = {"value": stage.work(context)}
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 shows it
            response = {"error": f"{type(error).__name__}: {error}"}
        with suppress(RuntimeError):  # the test is over and its store is closed
            context.store.set(f"{stage.name}/{context.rank}", json.dumps(response))
        if "error" in response:
            return


def _watch_stage(stage: Stage, report: Report, store: Any) -> bool:
    """Wait until all ranks have completed a stage. Returns whether they have, without an error."""
    deadline = time.monotonic() + stage.within_s
    waiting, values = set(range(report.ranks)), {}
    while waiting and time.monotonic() < deadline:
        finished = {rank for rank in waiting if store.check([f"{stage.name}/{rank}"])}
        for rank in finished:
            response = json.loads(store.get(f"{stage.name}/{rank}"))
            if "error" in response:
                report.errors[rank] = response["error"]
                deadline = min(deadline, time.monotonic() + AFTER_AN_ERROR_S)
            else:
                values[rank] = response["value"]
        waiting -= finished
        if waiting and not finished:
            time.sleep(LOOK_EVERY_S)
    if waiting or report.errors:
        progress = {rank: _read_progress(stage, rank, store) for rank in waiting}
        report.silent = [rank for rank in sorted(waiting) if progress[rank] == min(progress.values())]
        report.stopped_in, report.within_s = stage.name, stage.within_s
        return False
    report.by_stage[stage.name] = dict(sorted(values.items()))
    return True


def _read_progress(stage: Stage, rank: int, store: Any) -> int:
    """Read the part of a stage that a rank has reached."""
    key = f"at/{stage.name}/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def _wait_until(is_so: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    with suppress(RuntimeError):  # the host of the store has exited
        while time.monotonic() < deadline and not is_so():
            time.sleep(LOOK_EVERY_S)
