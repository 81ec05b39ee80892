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
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from surefoot.doctor.collect import collect
from surefoot.errors import ConfigError
from surefoot.parallel.ranks import shared_store
from surefoot.self_test import collectives, reach
from surefoot.self_test.report import Report

LOOK_EVERY_S = 0.05
AFTER_AN_ERROR_S = 3.0
"""How long the others are waited for once a rank has failed."""
LEAVE_WITHIN_S = 10.0
WRITTEN_BYTES = 64 << 20
OVER = "over"


@dataclass
class Place:
    """Where a rank stands, and what its stages leave for later ones."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    output_dir: Path | None
    store: Any
    firsts: list[int] = field(default_factory=list)
    """The first rank of each machine."""
    listener: reach.Listener | None = None

    @property
    def is_first_here(self) -> bool:
        return self.local_rank == 0


@dataclass(frozen=True)
class Stage:
    """One thing that all ranks do."""

    name: str
    work: Callable[[Place], Any]
    within_s: float
    """From when all ranks have done the stage before it."""


def _machine(place: Place) -> Any:
    """Each rank's snapshot: variables and versions are those of a process, the rest is the machine's."""
    folder = place.output_dir if place.is_first_here else None
    said = {**collect(folder).as_dict(), "local_rank": place.local_rank}
    if torch.cuda.is_available() and place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        said["device"] = torch.cuda.get_device_name(place.device)
    place.store.set(f"first/{place.rank}", str(int(place.is_first_here)))
    place.firsts = [rank for rank in range(place.size) if int(place.store.get(f"first/{rank}"))]
    return said


def _clock(place: Place) -> Any:
    if place.rank == 0:
        reach.answer_pings(place.store, place.firsts[1:])
    elif place.is_first_here:
        return reach.offset_s(place.store, place.rank)
    return [0.0, 0.0]


def _reach(place: Place) -> Any:
    """From each machine to each other one. Returns rank -> why it was not reached."""
    if not place.is_first_here:
        return {}
    place.listener = reach.Listener(place.rank)
    place.store.set(f"listens/{place.rank}", json.dumps(place.listener.place))
    problems = {}
    for other in place.firsts:
        if other != place.rank:
            at = json.loads(place.store.get(f"listens/{other}"))
            problem = reach.connect(other, at["addresses"], at["port"])
            if problem:
                problems[str(other)] = problem
    return problems


def _join(place: Place) -> Any:
    """The process group of a run, and the NCCL that it loaded."""
    dist.init_process_group(
        "nccl" if place.device.type == "cuda" else "gloo",
        store=PrefixStore("group", place.store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=DEEP_WITHIN_S),
        device_id=place.device if place.device.type == "cuda" else None,
    )
    dist.barrier()
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl" in line]
    version = ".".join(str(part) for part in torch.cuda.nccl.version()) if place.device.type == "cuda" else ""
    return {"nccl": version, "loaded": sorted(set(loaded))}


def _exchange(place: Place) -> Any:
    return collectives.exchange(place.rank, place.size, place.device)


def _collectives(place: Place) -> Any:
    return collectives.collectives(place.rank, place.size, place.device)


def _bandwidth(place: Place) -> Any:
    return collectives.bandwidth(place.size, place.device)


def _product(place: Place) -> Any:
    return collectives.product(place.device)


def _storage(place: Place) -> Any:
    """Speed of a large file in output_dir, MB/s: written and synced, then read from the disk."""
    if place.output_dir is None or not place.is_first_here:
        return None
    folder = next(one for one in (place.output_dir.absolute(), *place.output_dir.absolute().parents) if one.is_dir())
    path = folder / f".surefoot-probe-{place.rank}-{os.getpid()}.tmp"
    data = os.urandom(WRITTEN_BYTES)
    try:
        began_s = time.perf_counter()
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written_s = time.perf_counter() - began_s
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began_s = time.perf_counter()
            is_same = file.read() == data
            read_s = time.perf_counter() - began_s
    finally:
        path.unlink(missing_ok=True)
    return {"write": WRITTEN_BYTES / written_s / 1e6, "read": WRITTEN_BYTES / read_s / 1e6, "is_same": is_same}


DEEP_WITHIN_S = 60.0
TOGETHER = (
    Stage("machine", _machine, 30.0),
    Stage("clock", _clock, 20.0),
    Stage("reach", _reach, 60.0),
)
"""What any machine can be asked at any time."""
DEEP = (
    Stage("join", _join, DEEP_WITHIN_S),
    Stage("exchange", _exchange, DEEP_WITHIN_S),
    Stage("collectives", _collectives, DEEP_WITHIN_S),
    Stage("bandwidth", _bandwidth, DEEP_WITHIN_S),
)
"""What takes the devices and the network."""
ALONE = (Stage("product", _product, 30.0), Stage("storage", _storage, 60.0))
"""What each rank does by itself."""


def stages_of(size: int, *, is_deep: bool) -> Sequence[Stage]:
    """What is tried with so many ranks."""
    return (*TOGETHER, *(DEEP if is_deep and size > 1 else ()), *(ALONE if is_deep else ()))


def try_out(
    device_type: str,
    output_dir: Path | None,
    report_path: Path,
    *,
    is_deep: bool,
    stages: Sequence[Stage] | None = None,
) -> Report | None:
    """Go through the stages with the other ranks that the launcher's environment names.

    Returns what came of it at rank 0, which writes it to `report_path` after each stage; None at other ranks. A thread
    may still hang in a stage: the caller must leave by `process_end.leave`.
    Raises: ConfigError for an environment that does not fit.
    """
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise ConfigError(f"this process is no rank of a launcher: {', '.join(missing)} is not set.")
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if device_type == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"nproc_per_node: rank {rank} is number {local_rank} on this machine, which has "
            f"{torch.cuda.device_count()} GPUs. Start one rank per GPU."
        )
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    chosen = stages_of(size, is_deep=is_deep) if stages is None else stages
    at_work = PrefixStore("self-test", shared_store(rank))
    place = Place(rank, size, local_rank, device, output_dir, at_work)
    threading.Thread(target=_perform, args=(place, chosen), name="stages", daemon=True).start()
    watching = PrefixStore("self-test", shared_store(-1))  # a connection of its own: the other may wait for an answer
    if rank > 0:
        longest = sum(stage.within_s for stage in chosen) + LEAVE_WITHIN_S
        _wait_until(lambda: watching.check([OVER]), longest)
        with suppress(RuntimeError):  # rank 0 is gone
            watching.set(f"left/{rank}", "")
        return None
    report = Report(size, "nccl" if device_type == "cuda" else "gloo")
    for stage in chosen:
        if not _watch(stage, report, watching):
            break
        report.write(report_path)
    report.write(report_path)
    watching.set(OVER, "")
    others = [f"left/{other}" for other in range(1, size) if other not in report.silent]
    _wait_until(lambda: not others or watching.check(others), LEAVE_WITHIN_S)  # this process may host the store
    return report


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
        report.stopped_in, report.within_s, report.silent = stage.name, stage.within_s, sorted(waiting)
        return False
    report.said[stage.name] = dict(sorted(values.items()))
    return True


def _wait_until(is_so: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    with suppress(RuntimeError):  # who hosts the store is gone
        while time.monotonic() < deadline and not is_so():
            time.sleep(LOOK_EVERY_S)
