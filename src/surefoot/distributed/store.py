"""Store through which the ranks of a run find each other at its start, and the report of ranks that do not arrive.

The run folder is not claimed by then, so findings are reported on the terminal only.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from surefoot.distributed.listening import can_connect, is_one_machine, serve_store_at
from surefoot.errors import StoppedOnFinding, one_line
from surefoot.findings import Finding
from surefoot.findings.stalls import ON_ONE_MACHINE
from surefoot.system.console import say
from surefoot.system.process import launcher_number

LATE = timedelta(seconds=15)
"""Delay after which absent ranks are named: launchers start all ranks at once."""
DEADLINE = timedelta(minutes=10)
"""Time after which a rank that still waits for others fails; by then an image was pulled."""
ATTEMPT = "SUREFOOT_ATTEMPT"
"""Environment variable of ranks: how often the ranks of all machines were started before."""
COUNT = "number here"
POLL_S = 0.1
SLOW_START = (
    "If `nvidia-smi` takes seconds too, the driver starts anew for each process: turn persistence mode on (nvidia-smi "
    "-pm 1). "
)
"""Advice for GPUs of one machine that are not connected in time."""


def attempt() -> int:
    """Return how often the ranks of this run were started before, in a rank."""
    return int(os.environ.get(ATTEMPT, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def shared_store(rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """Connect to the store that the launcher's environment names, for this attempt of the run alone.

    If the launcher serves none, rank 0 does. A launcher may give a restarted run the store of the attempt before,
    with the addresses of ranks that have ended. Raises: RuntimeError if nobody answers there in time.
    """
    host, port = os.environ["MASTER_ADDR"], launcher_number("MASTER_PORT")
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = serve_store_at(host, port, num_ranks, timeout)
    else:
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not can_connect(host, port):  # torch would wait for it where no signal is heard
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"nobody answers at {host}:{port} within {timeout.total_seconds():.0f} s")
            time.sleep(POLL_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return PrefixStore(f"attempt-{attempt()}", store)


def rendezvous(rank: int, size: int) -> Any:
    """Wait at the store until all ranks have arrived, and return it. The lowest present rank reports who is late.

    Raises: StoppedOnFinding (SF111) after `DEADLINE`, naming the ranks that did not arrive, or the store.
    """
    try:
        store = shared_store(rank, size, DEADLINE)
    except RuntimeError as error:
        finding = _build_no_store_finding(rank, error)
        say(finding.as_text())
        raise StoppedOnFinding(finding) from error
    store.set(_presence_key(rank), socket.gethostname())
    began_s = checked_s = time.monotonic()
    reported: list[int] = []
    store.add(COUNT, 1)
    while store.add(COUNT, 0) < size:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        if now_s - checked_s < LATE.total_seconds():
            continue
        checked_s = now_s
        present = [other_rank for other_rank in range(size) if store.check([_presence_key(other_rank)])]
        absent = [other_rank for other_rank in range(size) if other_rank not in present]
        if not absent:
            break
        finding, is_over = (
            _build_absent_finding(store, absent, present, now_s - began_s),
            now_s - began_s >= DEADLINE.total_seconds(),
        )
        if rank == present[0] and (is_over or absent != reported):
            say(finding.as_text())
            reported = absent
        if is_over:
            raise StoppedOnFinding(finding)
    return store


@contextmanager
def connecting(rank: int, size: int, backend: str) -> Iterator[None]:
    """Report on rank 0 if the ranks, which have all arrived, are not connected soon (SF108)."""
    cause = f"all ranks have joined, but {backend} has not connected them after {LATE.total_seconds():.0f} s"
    fix = f"{SLOW_START if backend == 'nccl' else ''}{ON_ONE_MACHINE}" if is_one_machine(size) else ""
    finding = Finding(
        "SF108", cause, {"host": socket.gethostname(), **_read_interface_variables()}, fix, confidence=0.7
    )
    late = threading.Timer(LATE.total_seconds(), lambda: say(finding.as_text()))
    late.daemon = True
    if rank == 0:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _presence_key(rank: int) -> str:
    return f"here-{rank}"


def _build_absent_finding(store: Any, absent: list[int], present: list[int], waited_s: float) -> Finding:
    hosts: dict[str, list[str]] = {}
    for rank in present:
        hosts.setdefault(store.get(_presence_key(rank)).decode(), []).append(str(rank))
    names = ", ".join(map(str, absent))
    who = f"ranks {names}" if len(absent) > 1 else f"rank {names}"
    return Finding(
        "SF111",
        f"{who} of {len(absent) + len(present)} did not join within {waited_s:.0f} s after the others began",
        {
            "rank": absent[0],
            "absent": names,
            "there": "; ".join(f"{host}: {', '.join(ranks)}" for host, ranks in hosts.items()),
            "waited_s": round(waited_s),
        },
        "Inspect that process: was it started, on which machine, can torch be imported there (a hung file "
        "system), do all machines have the same nnodes and rdzv_endpoint?",
    )


def _build_no_store_finding(rank: int, error: RuntimeError) -> Finding:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return Finding(
        "SF111",
        f"rank {rank} cannot reach the store at {address}, where rank 0 or its launcher should be",
        {"rank": rank, "host": socket.gethostname(), "address": address, "error": one_line(error)},
        "Was rank 0 started? Is its machine reached from here by that name (MASTER_ADDR), and the port not blocked? "
        "Rank 0 listens on the interface of MASTER_ADDR alone: on its own machine that name must not be a loopback "
        "address (see /etc/hosts).",
    )


def _read_interface_variables() -> dict[str, str]:
    """Return the variables that set the network interfaces of the ranks."""
    return {name: os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name in os.environ}
