"""Injection of real faults: the tests prove with them that each fault is found and named.

A fault strikes inside one rank when a phase of a step begins there, or from outside with a signal. A rank imports this
module only if SUREFOOT_FAULT=kind:rank:step:file is set; `file` is created when the fault strikes.
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
import torch
import torch.distributed as dist

from surefoot.diagnostics.monitor.observers import FAULT_VARIABLE
from surefoot.events import Event, Phase, PhaseBegan
from surefoot.system import cgroup

LONG_S = 10_000
MOST_LIMIT_BYTES = 8 << 30
SO_ATTACH_FILTER, SO_MAX_PACING_RATE = 26, 47
"""Socket options of Linux; Python's socket module has no names for them."""
SLOW_BYTES_PER_S = 40_000
MOST_FILES = 1024
CROWD = 8
"""Number of processes that compete for the core of a rank."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and the finding that it must cause."""

    about: str
    phase: Phase
    """Phase at whose beginning it strikes."""
    strike: Callable[[bool], object]
    """Function that causes the fault. Its argument is whether this is the target rank; most do nothing elsewhere."""
    code: str
    """Code that must be found; empty for a harmless event that must not be mistaken for a fault."""
    names_rank: bool = True
    on_all: bool = False
    """Whether it strikes on every rank."""
    in_each_step: bool = False
    """Whether it strikes again in every step after the first."""
    first_step: int = 8
    """First step in which it may strike."""
    needs_limits: bool = False
    """Whether the run needs its own cgroup."""
    is_alone: bool = False
    """Whether no other run may run at the same time, because the two would take each other's cores."""


def _send_signal(number: int) -> Callable[[bool], None]:
    """Return a function that sends a signal to its own process."""
    return lambda _: os.kill(os.getpid(), number)


def _sleep(seconds: float) -> Callable[[bool], None]:
    """Return a function that sleeps."""
    return lambda _: time.sleep(seconds)


def _loop_forever(_: bool) -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pass


def _block_on_pipe(_: bool) -> None:
    """Read data that never arrive: open a pipe without a writer."""
    path = Path(os.environ[FAULT_VARIABLE].split(":")[3]).with_suffix(f".pipe-{os.getpid()}")
    os.mkfifo(path)
    open(path, "rb").close()


def _acquire_lock_twice(_: bool) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_gil(_: bool) -> None:
    mutex = ctypes.create_string_buffer(64)  # zeros: a mutex of glibc that is free
    library = ctypes.PyDLL(None)  # it holds the GIL during its calls
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _call_collective(size: int, *, op: str = "all_reduce") -> None:
    ones = torch.ones(size, device=_select_device())
    if op == "all_reduce":
        dist.all_reduce(ones)
    else:
        dist.broadcast(ones, 0)


def _select_device() -> str:
    """Return the device of the tensors that the ranks' process group communicates."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _skip_collective(_: bool) -> None:
    """Skip the next all-reduce that this rank calls."""
    original = dist.all_reduce

    def skipped(*_: Any, **__: Any) -> None:
        dist.all_reduce = original

    dist.all_reduce = skipped


def _change_size(is_target: bool) -> None:
    _call_collective(9 if is_target else 7)


def _change_collective(is_target: bool) -> None:
    _call_collective(7, op="broadcast" if is_target else "all_reduce")


def _swap_groups(is_target: bool) -> None:
    second = dist.new_group(group_desc="drill")
    groups = [None, second]
    for group in reversed(groups) if is_target else groups:
        dist.all_reduce(torch.ones(3, device=_select_device()), group=group)


_BUFFERS: list[bytearray] = []
_MAPS: list[mmap.mmap] = []
_OBJECTS: list[list[list[int]]] = []
_OPEN_FILES: list[int] = []
_BEGAN_S = time.monotonic()


def _leak_memory(_: bool) -> None:
    _BUFFERS.append(bytearray(os.urandom(1 << 20)))


def _leak_files(_: bool) -> None:
    """Leak eight open files a second, with a limit of 1024."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))
    while len(_OPEN_FILES) < 8 * (time.monotonic() - _BEGAN_S):
        _OPEN_FILES.append(os.open(os.devnull, os.O_RDONLY))


def _make_garbage(_: bool) -> None:
    _OBJECTS.append([[number] for number in range(100_000)])
    del _OBJECTS[:-5]
    for _unused in range(4):
        gc.collect()


def _throttle_cpu(_: bool) -> None:
    """Limit all processes of the run together to a fifth of a CPU."""
    file = cgroup.control_file("cpu", "cpu.max", "cpu.cfs_quota_us")
    assert file is not None
    file.write_text("20000 100000" if file.name == "cpu.max" else "20000")


def _crowd_core(_: bool) -> None:
    """Pin all threads of the rank to one core, and start processes that compete for it as long as the rank lives."""
    core = max(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})
    for _number in range(CROWD):
        subprocess.Popen(["sh", "-c", 'while kill -0 "$PPID"; do :; done'], stderr=subprocess.DEVNULL)


def _freeze_process(_: bool) -> None:
    """Freeze the process in the kernel's freezer: it is in uninterruptible sleep, as if a disk did not respond."""
    memory_file = cgroup.control_file("memory", "memory.max", "memory.limit_in_bytes")
    assert memory_file is not None
    group = Path("/sys/fs/cgroup/freezer") / memory_file.parent.name
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "freezer.state").write_text("FROZEN")


def _exhaust_memory(_: bool) -> None:
    limit = cgroup.memory_limit_bytes()
    if limit is None or limit > MOST_LIMIT_BYTES:
        raise RuntimeError("this fault needs a small memory limit: it would take all memory of the machine")
    while True:
        _BUFFERS.append(bytearray(b"x" * (32 << 20)))


def _copy_peer_sockets() -> list[socket.socket]:
    """Return copies of this rank's gloo connections to the other ranks, without those to the store."""
    store = int(os.environ["MASTER_PORT"])
    connections = psutil.Process().net_connections("tcp")
    return [
        socket.socket(fileno=os.dup(connection.fd))
        for connection in connections
        if connection.status == psutil.CONN_ESTABLISHED and store not in (connection.laddr.port, connection.raddr.port)
    ]


def _cut_network(_: bool) -> None:
    """Make the kernel silently drop everything that arrives from the other ranks, as a broken network does."""
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: take 0 bytes of the packet
    code = ctypes.create_string_buffer(drop_all)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for peer in _copy_peer_sockets():
        with peer:
            peer.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _slow_network(_: bool) -> None:
    """Limit what the kernel sends to the other ranks to the rate of a modem."""
    for peer in _copy_peer_sockets():
        with peer:
            peer.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, SLOW_BYTES_PER_S)


def _map_file(_: bool) -> None:
    """Map and read another MiB of a file in each step: this grows the page cache and is no leak."""
    path = Path(f"{os.environ[FAULT_VARIABLE].split(':')[3]}-{len(_MAPS)}.mapped")
    path.write_bytes(os.urandom(1 << 20))
    with open(path, "rb") as file:
        _MAPS.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    path.unlink()
    sum(_MAPS[-1][:: mmap.PAGESIZE])


FAULTS: dict[str, Fault] = {
    "killed": Fault("SIGKILL", "forward", _send_signal(signal.SIGKILL), "SF101"),
    "aborted": Fault("SIGABRT", "backward", _send_signal(signal.SIGABRT), "SF101"),
    "crashed": Fault("SIGSEGV", "forward", _send_signal(signal.SIGSEGV), "SF101"),
    "left": Fault("exit with status 3 and no message", "optimizer", lambda _: os._exit(3), "SF101"),
    "left-quietly": Fault("exit with status 0, before the end", "optimizer", lambda _: os._exit(0), "SF101"),
    "stopped": Fault("SIGSTOP", "forward", _send_signal(signal.SIGSTOP), "SF102"),
    "stopped-in-collective": Fault("SIGSTOP before a collective", "collectives", _send_signal(signal.SIGSTOP), "SF102"),
    "sleeping": Fault("a sleep in the forward", "forward", _sleep(LONG_S), "SF106"),
    "sleeping-backward": Fault("a sleep in the backward", "backward", _sleep(LONG_S), "SF106"),
    "sleeping-optimizer": Fault("a sleep in the optimizer", "optimizer", _sleep(LONG_S), "SF106"),
    "sleeping-save": Fault("a save that does not end", "save", _sleep(LONG_S), "SF106"),
    "spinning": Fault("a loop that does not end", "forward", _loop_forever, "SF106"),
    "data-asleep": Fault("data that never arrive", "data_wait", _sleep(LONG_S), "SF107"),
    "data-blocked": Fault("a read that does not return", "data_wait", _block_on_pipe, "SF107"),
    "locked": Fault("a lock taken twice", "forward", _acquire_lock_twice, "SF109"),
    "dead-thread": Fault("a queue that no thread fills", "forward", lambda _: queue.Queue[int]().get(), "SF109"),
    "gil-held": Fault("native code that keeps Python's lock", "forward", _hold_gil, "SF109"),
    "extra-collective": Fault("a collective on one rank only", "forward", lambda _: _call_collective(7), "SF104"),
    "skipped-collective": Fault("a collective left out on one rank", "collectives", _skip_collective, "SF105"),
    "other-kind": Fault("another collective on one rank", "forward", _change_collective, "SF104", False, on_all=True),
    "other-size": Fault("another size on one rank", "forward", _change_size, "SF104", False, on_all=True),
    "other-order": Fault(
        "two groups in another order on one rank", "forward", _swap_groups, "SF105", False, on_all=True
    ),
    "network-cut": Fault("a network that drops everything", "forward", _cut_network, "SF108", False, on_all=True),
    "network-slow": Fault(
        "a network that is slow", "forward", _slow_network, "SF304", False, on_all=True, is_alone=True
    ),  # detected by cores that are free and not used
    "leaking": Fault("a list that keeps 1 MiB a step", "forward", _leak_memory, "SF202", in_each_step=True),
    "leaking-files": Fault(
        "files that stay open", "forward", _leak_files, "SF207", in_each_step=True, is_alone=True
    ),  # detected after a minute, in which ranks that other runs delay would be reported instead
    "frozen": Fault(
        "uninterruptible sleep, as of a disk that does not respond",
        "forward",
        _freeze_process,
        "SF103",
        needs_limits=True,
    ),
    "out-of-memory": Fault(
        "memory up to the limit of the cgroup", "forward", _exhaust_memory, "SF201", needs_limits=True
    ),
    "slow-data": Fault("data that take half a second", "data_wait", _sleep(0.6), "SF302", in_each_step=True),
    "straggler": Fault("a rank that is slow", "forward", _sleep(0.6), "SF303", in_each_step=True),
    "garbage": Fault("a step that makes many objects", "optimizer", _make_garbage, "SF305", in_each_step=True),
    "throttled": Fault(
        "a cgroup that may use a fifth of a CPU", "forward", _throttle_cpu, "SF306", False, needs_limits=True
    ),
    "slowed": Fault(
        "steps that become slow",
        "optimizer",
        _sleep(0.6),
        "SF301",
        False,
        on_all=True,
        in_each_step=True,
        first_step=40,
    ),
    "crowded": Fault(
        "other processes on the core of one rank", "forward", _crowd_core, "SF313", first_step=40, is_alone=True
    ),
    "hiccup": Fault("a step of six seconds", "forward", _sleep(6.0), ""),
    "page-cache": Fault("a file that is mapped, 1 MiB a step", "forward", _map_file, "", in_each_step=True),
    "barrier-of-one": Fault("a barrier on one rank only", "save", lambda _: dist.barrier(), "SF105"),
}


class FaultInjector:
    """An observer that strikes the fault on its rank."""

    def __init__(self, spec: str, rank: int) -> None:
        kind, number, step, file = spec.split(":", 3)
        self._fault, self._is_target = FAULTS[kind], rank == int(number)
        self._step, self._file = int(step), Path(file)
        self._has_struck = self._file.exists()  # a restarted run has no fault

    def observe(self, event: Event) -> None:
        if self._has_struck or not (self._is_target or self._fault.on_all):
            return
        if not isinstance(event, PhaseBegan) or event.phase != self._fault.phase:
            return
        if event.step == self._step or (self._fault.in_each_step and event.step > self._step):
            self._has_struck = not self._fault.in_each_step
            if self._is_target and event.step == self._step:
                self._file.write_text(str(time.time()))
                print(
                    f"drill: {self._fault.about} on rank {event.rank} in step {event.step}", file=sys.stderr, flush=True
                )
            self._fault.strike(self._is_target)
