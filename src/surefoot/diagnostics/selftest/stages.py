"""One rank of a self-test: it goes through the stages in a thread, and rank 0 watches how far each of them is.

A stage that hangs can be told but not ended, so processes leave when the watch says that the test is over. What ranks
tell goes over the launcher's store: the network between them is what is being tested.
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
from surefoot.diagnostics.selftest.report import Report
from surefoot.diagnostics.selftest.results import checks_of
from surefoot.distributed.listening import is_one_machine
from surefoot.distributed.process_group import gpu_of
from surefoot.distributed.store import shared_store
from surefoot.errors import ConfigError, StoppedOnFinding
from surefoot.system.loopback import kept_on_this_machine
from surefoot.system.machine_snapshot import collect, existing_folder
from surefoot.system.nvml import read_visible

LOOK_EVERY_S = 0.05
AFTER_AN_ERROR_S = 3.0
"""How long the others are waited for once a rank has failed."""
CONNECT_WITHIN = timedelta(seconds=120)
"""To the launcher's store."""
LEAVE_WITHIN_S = 10.0
WRITTEN_BYTES = 64 << 20
OVER = "over"
"""Key under which rank 0 says that the test is over, and with what exit status."""


@dataclass
class Place:
    """Where a rank stands, and what its stages leave for later ones."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    output_dir: Path | None
    rdzv_endpoint: str | None
    store: Any
    firsts: list[int] = field(default_factory=list)
    """The first rank of each machine."""
    listener: connectivity.Listener | None = None

    @property
    def is_first_here(self) -> bool:
        return self.local_rank == 0

    def reached(self, stage: str, part: int) -> None:
        """Say how far this rank is, so that the one who holds up the others is known."""
        self.store.set(f"at/{stage}/{self.rank}", str(part))


@dataclass(frozen=True)
class Stage:
    """One thing that all ranks do."""

    name: str
    work: Callable[[Place], Any]
    within_s: float
    """From when all ranks have done the stage before it."""


def _arrive(place: Place) -> Any:
    place.store.set(f"first/{place.rank}", str(int(place.is_first_here)))


def _machine(place: Place) -> Any:
    """Each rank's snapshot: variables and versions are those of a process, the rest is the machine's."""
    is_first = place.is_first_here
    said = collect(
        place.output_dir if is_first else None, place.rdzv_endpoint if is_first else None, patient=True, gpus=is_first
    )
    device = ""
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        device = torch.cuda.get_device_name(place.device)
    return {**said.as_dict(), "local_rank": place.local_rank, "device": device}


def _clock(place: Place) -> Any:
    if place.rank == 0:
        firsts = [rank for rank in range(place.size) if int(place.store.get(f"first/{rank}"))]
        place.store.set("firsts", json.dumps(firsts))
    place.firsts = json.loads(place.store.get("firsts"))
    if place.rank == 0:
        connectivity.answer_pings(place.store, place.firsts[1:])
    elif place.is_first_here:
        return connectivity.offset_s(place.store, place.rank)
    return [0.0, 0.0]


def _reach(place: Place) -> Any:
    """From each machine to each other one. Returns rank -> why it was not reached."""
    if not place.is_first_here:
        return {}
    if len(place.firsts) == 1:
        return {}
    addresses = connectivity.listening_addresses(os.environ, place.rdzv_endpoint)
    place.listener = connectivity.Listener(place.rank, addresses)
    place.store.set(f"listens/{place.rank}", json.dumps(place.listener.places))
    others = {other: json.loads(place.store.get(f"listens/{other}")) for other in place.firsts if other != place.rank}
    return {str(other): problem for other, problem in connectivity.connect_to_all(others).items() if problem}


def _join(place: Place) -> Any:
    """The process group of a run, and the NCCL that it loaded."""
    dist.init_process_group(
        "nccl" if place.device.type == "cuda" else "gloo",
        store=PrefixStore("group", place.store),
        rank=place.rank,
        world_size=place.size,
        timeout=GROUP_TIMEOUT,
        device_id=place.device if place.device.type == "cuda" else None,
    )
    dist.barrier()
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl" in line]
    version = ".".join(str(part) for part in torch.cuda.nccl.version()) if place.device.type == "cuda" else ""
    return {"nccl": version, "loaded": sorted(set(loaded))}


def _exchange(place: Place) -> Any:
    return collectives.exchange(place.rank, place.size, place.device, lambda part: place.reached("exchange", part))


def _collectives(place: Place) -> Any:
    return collectives.collectives(
        place.rank, place.size, place.device, lambda part: place.reached("collectives", part)
    )


def _bandwidth(place: Place) -> Any:
    return collectives.bandwidth(place.size, place.device)


def _product(place: Place) -> Any:
    speed, card = collectives.product(place.device, lambda: _card(place.device))
    return {"tflops": speed, "card": card}


def _card(device: torch.device) -> dict[str, Any] | None:
    """What NVML says of a rank's GPU at this moment; None where it tells nothing."""
    if device.type != "cuda":
        return None
    try:
        card = read_visible(device.index or 0)
    except Exception:  # noqa: BLE001 - no NVML here: the doctor's own checks say why
        return None
    return asdict(card) if card is not None else None


def _storage(place: Place) -> Any:
    """Speed of a large file in output_dir, MB/s: written and synced, then read from the disk."""
    if place.output_dir is None or not place.is_first_here:
        return None
    data = os.urandom(WRITTEN_BYTES)
    path = existing_folder(place.output_dir) / f".surefoot-probe-{place.rank}-{os.getpid()}.tmp"
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
"""Never the first to run out: a collective that times out fails at the rank that waits."""
TOGETHER = (
    Stage("arrive", _arrive, 180.0),
    Stage("machine", _machine, 60.0),
    Stage("clock", _clock, 30.0),
    Stage("reach", _reach, 60.0),
)
"""What any machine can be asked at any time."""
DEEP = (
    Stage("join", _join, DEEP_WITHIN_S),
    Stage("exchange", _exchange, DEEP_WITHIN_S),
    Stage("collectives", _collectives, DEEP_WITHIN_S),
    Stage("bandwidth", _bandwidth, 2 * DEEP_WITHIN_S),
)
"""What takes the devices and the network."""
SINGLE_PROCESS = (Stage("product", _product, 30.0), Stage("storage", _storage, 60.0))
"""What each rank does by itself."""


def longest_s(stages: Sequence[Stage]) -> float:
    """After which a test of these is over, however it goes."""
    return sum(stage.within_s for stage in stages) + 2 * LEAVE_WITHIN_S


def stages_of(size: int, *, is_deep: bool) -> Sequence[Stage]:
    """What is tried with so many ranks."""
    return (*TOGETHER, *(DEEP if is_deep and size > 1 else ()), *(SINGLE_PROCESS if is_deep else ()))


@dataclass(frozen=True)
class Task:
    """What a rank is asked to do, as JSON."""

    device: str
    output_dir: str | None
    rdzv_endpoint: str | None
    report: str
    """Where rank 0 writes what came of it, after each stage."""
    is_deep: bool


def try_out(task: Task, stages: Sequence[Stage] | None = None) -> tuple[Report | None, int]:
    """Go through the stages with the other ranks that the launcher's environment names.

    Returns what came of it at rank 0, None at others; and the exit status that rank 0 found. A thread may still hang in
    a stage: the caller must leave by `process.leave`.
    Raises: ConfigError for an environment that does not fit, or a store that does not answer.
    """
    rank, size, local_rank = _numbers()
    device = gpu_of(rank, local_rank) if task.device == "cuda" else torch.device("cpu")
    chosen = stages_of(size, is_deep=task.is_deep) if stages is None else stages
    try:
        working = PrefixStore("self-test", shared_store(rank, size, CONNECT_WITHIN))
        watching = PrefixStore("self-test", shared_store(-1, size, CONNECT_WITHIN))  # the other may wait for an answer
    except RuntimeError as error:
        raise ConfigError(
            f"rank {rank}: nobody answers at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, where rank 0 or "
            f"its launcher should be: {str(error).splitlines()[0]}. Was rank 0 started, and is its machine reached?"
        ) from error
    output_dir = Path(task.output_dir) if task.output_dir is not None else None
    place = Place(rank, size, local_rank, device, output_dir, task.rdzv_endpoint, working)
    report = Report(size, "nccl" if task.device == "cuda" else "gloo")
    path = Path(task.report)
    last = threading.Timer(longest_s(chosen), _give_up, (report, path, chosen, rank))
    last.daemon = True
    last.start()  # for a store that answers nothing any more: asking it has no deadline
    with kept_on_this_machine(is_needed=is_one_machine(size)):
        threading.Thread(target=_perform, args=(place, chosen), name="stages", daemon=True).start()
        status = _lead(report, chosen, watching, path) if rank == 0 else _follow(rank, watching, longest_s(chosen))
    last.cancel()
    return (report if rank == 0 else None), status


def _numbers() -> tuple[int, int, int]:
    """(rank, size, local rank) of the environment. Raises: ConfigError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(f"this process is no rank of a launcher: {', '.join(missing)} is not set.")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def _lead(report: Report, stages: Sequence[Stage], store: Any, path: Path) -> int:
    """At rank 0: watch all ranks go through the stages, and tell them how it ended."""
    for stage in stages:
        if not _watch(stage, report, store):
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


def _follow(rank: int, store: Any, within_s: float) -> int:
    """At any other rank: wait until rank 0 says that it is over."""
    _wait_until(lambda: store.check([OVER]), within_s)
    with suppress(RuntimeError):  # rank 0 is gone
        if store.check([OVER]):
            store.set(f"left/{rank}", "")
            return int(store.get(OVER))
    return StoppedOnFinding.exit_status


def _give_up(report: Report, path: Path, stages: Sequence[Stage], rank: int) -> None:
    if rank == 0:
        report.stopped_in = report.stopped_in or next((s.name for s in stages if s.name not in report.said), "")
        report.write(path)
    os._exit(1)


def _perform(place: Place, stages: Sequence[Stage]) -> None:
    for stage in stages:
        try:
            said = {"value": stage.work(place)}
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 shows it
            said = {"error": f"{type(error).__name__}: {error}"}
        with suppress(RuntimeError):  # the test is over, and the store with it
            place.store.set(f"{stage.name}/{place.rank}", json.dumps(said))
        if "error" in said:
            return


def _watch(stage: Stage, report: Report, store: Any) -> bool:
    """Wait until all ranks have done a stage; whether they have, and without an error."""
    deadline = time.monotonic() + stage.within_s
    waiting, values = set(range(report.ranks)), {}
    while waiting and time.monotonic() < deadline:
        done = {rank for rank in waiting if store.check([f"{stage.name}/{rank}"])}
        for rank in done:
            said = json.loads(store.get(f"{stage.name}/{rank}"))
            if "error" in said:
                report.errors[rank] = said["error"]
                deadline = min(deadline, time.monotonic() + AFTER_AN_ERROR_S)
            else:
                values[rank] = said["value"]
        waiting -= done
        if waiting and not done:
            time.sleep(LOOK_EVERY_S)
    if waiting or report.errors:
        at = {rank: _part_of(stage, rank, store) for rank in waiting}
        report.silent = [rank for rank in sorted(waiting) if at[rank] == min(at.values())]
        report.stopped_in, report.within_s = stage.name, stage.within_s
        return False
    report.said[stage.name] = dict(sorted(values.items()))
    return True


def _part_of(stage: Stage, rank: int, store: Any) -> int:
    """How far a rank has said that it is in a stage."""
    key = f"at/{stage.name}/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def _wait_until(is_so: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    with suppress(RuntimeError):  # who hosts the store is gone
        while time.monotonic() < deadline and not is_so():
            time.sleep(LOOK_EVERY_S)
