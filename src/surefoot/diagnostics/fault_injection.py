"""Real faults, struck on purpose: the tests prove with them that each is found and named.

A fault strikes inside one rank when a phase of a step begins there, or from outside with a signal. Nothing of this is
loaded in a run that is not told to by SUREFOOT_FAULT=kind:rank:step:file; `file` is made when the fault strikes.
"""

import ctypes
import gc
import mmap
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from surefoot.events import Event, Phase, PhaseBegan
from surefoot.system import cgroup

VARIABLE = "SUREFOOT_FAULT"
LONG_S = 10_000
MOST_LIMIT_BYTES = 8 << 30
SO_ATTACH_FILTER, SO_MAX_PACING_RATE = 26, 47
"""Of Linux; Python's socket module has no names for them."""
SLOW_BYTES_PER_S = 40_000
MOST_FILES = 1024
CROWD = 8
"""Processes that want the core of a rank, too."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and what must be found."""

    about: str
    phase: Phase
    """At whose beginning it strikes."""
    strike: Callable[[bool], None]
    """Gets whether this is the rank it is for; most do nothing on the others."""
    code: str
    """What must be found; empty for what is none and must not be taken for one."""
    names_rank: bool = True
    on_all: bool = False
    """Whether it strikes on every rank."""
    in_each_step: bool = False
    """Whether it strikes again in every step after the first."""
    first_step: int = 8
    """Before which it does not strike."""
    needs_limits: bool = False
    """Whether the run must be in a cgroup of its own."""
    is_alone: bool = False
    """Whether no other run may be there: one that takes its cores, or whose cores it takes."""


def _signal(number: int) -> Callable[[bool], None]:
    return lambda _: os.kill(os.getpid(), number)


def _leave(_: bool) -> None:
    os._exit(3)


def _leave_quietly(_: bool) -> None:
    os._exit(0)


def _sleep(_: bool) -> None:
    time.sleep(LONG_S)


def _spin(_: bool) -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pass


def _read_for_ever(_: bool) -> None:
    """A file system that does not answer: opening a pipe that no one writes to."""
    path = Path(os.environ[VARIABLE].split(":")[3]).with_suffix(f".pipe-{os.getpid()}")
    os.mkfifo(path)
    open(path, "rb").close()


def _lock_twice(_: bool) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _wait_for_dead_thread(_: bool) -> None:
    queue.Queue[int]().get()


def _hold_the_gil(_: bool) -> None:
    mutex = ctypes.create_string_buffer(64)  # zeros: a mutex of glibc that is free
    library = ctypes.PyDLL(None)  # it keeps Python's lock during its calls
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _collective(size: int, *, op: str = "all_reduce") -> None:
    import torch
    import torch.distributed as dist

    ones = torch.ones(size, device=_device())
    if op == "all_reduce":
        dist.all_reduce(ones)
    else:
        dist.broadcast(ones, 0)


def _device() -> str:
    """Where the tensors of the ranks' group lie."""
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _extra_collective(_: bool) -> None:
    _collective(7)


def _skip_collective(_: bool) -> None:
    """The next all-reduce that this rank asks for is not done."""
    import torch.distributed as dist

    original = dist.all_reduce

    def skipped(*_: Any, **__: Any) -> None:
        dist.all_reduce = original

    dist.all_reduce = skipped


def _other_size(is_odd: bool) -> None:
    _collective(9 if is_odd else 7)


def _other_kind(is_odd: bool) -> None:
    _collective(7, op="broadcast" if is_odd else "all_reduce")


def _other_order(is_odd: bool) -> None:
    import torch
    import torch.distributed as dist

    second = dist.new_group(group_desc="drill")
    groups = [None, second]
    for group in reversed(groups) if is_odd else groups:
        dist.all_reduce(torch.ones(3, device=_device()), group=group)


def _barrier_of_one(_: bool) -> None:
    import torch.distributed as dist

    dist.barrier()


_KEPT: list[bytearray] = []
_MAPPED: list[mmap.mmap] = []
_OBJECTS: list[list[list[int]]] = []
_OPEN: list[int] = []
_BEGAN_S = time.monotonic()


def _leak(_: bool) -> None:
    _KEPT.append(bytearray(os.urandom(1 << 20)))


def _leak_files(_: bool) -> None:
    """Eight files a second stay open, of 1024 that may be."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))
    while len(_OPEN) < 8 * (time.monotonic() - _BEGAN_S):
        _OPEN.append(os.open(os.devnull, os.O_RDONLY))


def _drag(_: bool) -> None:
    time.sleep(0.6)


def _make_garbage(_: bool) -> None:
    _OBJECTS.append([[number] for number in range(100_000)])
    del _OBJECTS[:-5]
    for _unused in range(4):
        gc.collect()


def _throttle(_: bool) -> None:
    """A fifth of a CPU for all processes of the run."""
    file = cgroup.control_file("cpu", "cpu.max", "cpu.cfs_quota_us")
    assert file is not None
    file.write_text("20000 100000" if file.name == "cpu.max" else "20000")


def _crowd(_: bool) -> None:
    """All threads of the rank on one core, which other processes want, too, for as long as the rank is there."""
    core = max(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})
    for _number in range(CROWD):
        subprocess.Popen(["sh", "-c", 'while kill -0 "$PPID"; do :; done'], stderr=subprocess.DEVNULL)


def _freeze(_: bool) -> None:
    """Into the kernel's freezer, where a process is in uninterruptible sleep as behind a disk that does not answer."""
    mine = cgroup.control_file("memory", "memory.max", "memory.limit_in_bytes")
    assert mine is not None
    group = Path("/sys/fs/cgroup/freezer") / mine.parent.name
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "freezer.state").write_text("FROZEN")


def _exhaust_memory(_: bool) -> None:
    limit = cgroup.memory_limit_bytes()
    if limit is None or limit > MOST_LIMIT_BYTES:
        raise RuntimeError("this fault needs a small memory limit: it would take all memory of the machine")
    while True:
        _KEPT.append(bytearray(b"x" * (32 << 20)))


def _sockets_to_peers() -> list[socket.socket]:
    """Copies of this rank's connections to the others, which gloo made; not those to the store."""
    store = int(os.environ["MASTER_PORT"])
    connections = psutil.Process().net_connections("tcp")
    return [
        socket.socket(fileno=os.dup(one.fd))
        for one in connections
        if one.status == psutil.CONN_ESTABLISHED and store not in (one.laddr.port, one.raddr.port)
    ]


def _cut_network(_: bool) -> None:
    """The kernel drops whatever comes in from the other ranks, as a broken network does; no one is told."""
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: take 0 bytes of the packet
    code = ctypes.create_string_buffer(drop_all)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for peer in _sockets_to_peers():
        with peer:
            peer.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _slow_network(_: bool) -> None:
    """The kernel sends to the other ranks at a rate of a modem."""
    for peer in _sockets_to_peers():
        with peer:
            peer.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, SLOW_BYTES_PER_S)


def _hiccup(_: bool) -> None:
    time.sleep(6.0)


def _map_a_file(_: bool) -> None:
    """Each step another mebibyte of a file is mapped and read: the page cache, no leak."""
    path = Path(f"{os.environ[VARIABLE].split(':')[3]}-{len(_MAPPED)}.mapped")
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file:
        _MAPPED.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    path.unlink()
    sum(_MAPPED[-1][:: mmap.PAGESIZE])


FAULTS: dict[str, Fault] = {
    "killed": Fault("SIGKILL", "forward", _signal(signal.SIGKILL), "SF101"),
    "aborted": Fault("SIGABRT", "backward", _signal(signal.SIGABRT), "SF101"),
    "crashed": Fault("SIGSEGV", "forward", _signal(signal.SIGSEGV), "SF101"),
    "left": Fault("exit with status 3, without a word", "optimizer", _leave, "SF101"),
    "left-quietly": Fault("exit with status 0, before the end", "optimizer", _leave_quietly, "SF101"),
    "stopped": Fault("SIGSTOP", "forward", _signal(signal.SIGSTOP), "SF102"),
    "stopped-in-collective": Fault("SIGSTOP before a collective", "communicate", _signal(signal.SIGSTOP), "SF102"),
    "sleeping": Fault("a sleep in the forward", "forward", _sleep, "SF106"),
    "sleeping-backward": Fault("a sleep in the backward", "backward", _sleep, "SF106"),
    "sleeping-optimizer": Fault("a sleep in the optimizer", "optimizer", _sleep, "SF106"),
    "sleeping-save": Fault("a save that does not end", "save", _sleep, "SF106"),
    "spinning": Fault("a loop that does not end", "forward", _spin, "SF106"),
    "data-asleep": Fault("data that do not come", "wait for data", _sleep, "SF107"),
    "data-blocked": Fault("a file system that does not answer", "wait for data", _read_for_ever, "SF107"),
    "locked": Fault("a lock taken twice", "forward", _lock_twice, "SF109"),
    "dead-thread": Fault("a queue that no thread fills", "forward", _wait_for_dead_thread, "SF109"),
    "gil-held": Fault("native code that keeps Python's lock", "forward", _hold_the_gil, "SF109"),
    "extra-collective": Fault("a collective on one rank only", "forward", _extra_collective, "SF104"),
    "skipped-collective": Fault("a collective left out on one rank", "communicate", _skip_collective, "SF105"),
    "other-kind": Fault("another collective on one rank", "forward", _other_kind, "SF104", False, on_all=True),
    "other-size": Fault("another size on one rank", "forward", _other_size, "SF104", False, on_all=True),
    "other-order": Fault(
        "two groups in another order on one rank", "forward", _other_order, "SF105", False, on_all=True
    ),
    "network-cut": Fault(
        "a network that carries nothing any more", "forward", _cut_network, "SF108", False, on_all=True
    ),
    "network-slow": Fault(
        "a network that is slow", "forward", _slow_network, "SF304", False, on_all=True, is_alone=True
    ),  # seen by cores that are free and are not used
    "leaking": Fault("a list that keeps 1 MiB a step", "forward", _leak, "SF202", in_each_step=True),
    "leaking-files": Fault(
        "files that stay open", "forward", _leak_files, "SF207", in_each_step=True, is_alone=True
    ),  # seen after a minute, in which ranks that other runs hold up are named for it
    "frozen": Fault("uninterruptible sleep", "forward", _freeze, "SF103", needs_limits=True),
    "out-of-memory": Fault(
        "memory up to the limit of the cgroup", "forward", _exhaust_memory, "SF201", needs_limits=True
    ),
    "slow-data": Fault("data that take half a second", "wait for data", _drag, "SF302", in_each_step=True),
    "straggler": Fault("a rank that is slow", "forward", _drag, "SF303", in_each_step=True),
    "garbage": Fault("a step that makes many objects", "optimizer", _make_garbage, "SF305", in_each_step=True),
    "throttled": Fault(
        "a cgroup that may use a fifth of a CPU", "forward", _throttle, "SF306", False, needs_limits=True
    ),
    "slowed": Fault(
        "steps that become slow", "optimizer", _drag, "SF301", False, on_all=True, in_each_step=True, first_step=40
    ),
    "crowded": Fault(
        "other processes on the core of one rank", "forward", _crowd, "SF313", first_step=40, is_alone=True
    ),
    "hiccup": Fault("a step of six seconds", "forward", _hiccup, ""),
    "page-cache": Fault("a file that is mapped, 1 MiB a step", "forward", _map_a_file, "", in_each_step=True),
    "barrier-of-one": Fault("a barrier on one rank only", "save", _barrier_of_one, "SF105"),
}


class FaultInjector:
    """The observer that breaks its rank, once."""

    def __init__(self, told: str, rank: int) -> None:
        kind, number, step, file = told.split(":", 3)
        self._fault, self._is_odd = FAULTS[kind], rank == int(number)
        self._step, self._file = int(step), Path(file)
        self._has_struck = self._file.exists()  # a run that was started again is sound

    def observe(self, event: Event) -> None:
        if self._has_struck or not (self._is_odd or self._fault.on_all):
            return
        if not isinstance(event, PhaseBegan) or event.phase != self._fault.phase:
            return
        if event.step == self._step or (self._fault.in_each_step and event.step > self._step):
            self._has_struck = not self._fault.in_each_step
            if self._is_odd and event.step == self._step:
                self._file.write_text(str(time.time()))
                print(
                    f"drill: {self._fault.about} on rank {event.rank} in step {event.step}", file=sys.stderr, flush=True
                )
            self._fault.strike(self._is_odd)
