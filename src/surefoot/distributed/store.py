"""How the ranks of a run find each other at its start, and who is named where one does not come.

Nothing of the run is claimed by then, so what is found here is told on the terminal alone.
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

from surefoot.distributed.listening import serve_store_at
from surefoot.errors import StoppedOnFinding
from surefoot.findings import CATALOGUE, Finding
from surefoot.system.console import say
from surefoot.system.process import launcher_number

LATE = timedelta(seconds=15)
"""Launchers start all ranks at once: after so long the absent ones are named."""
DEADLINE = timedelta(minutes=10)
"""After which a rank fails that still waits for others; by then an image was pulled."""
ATTEMPT = "SUREFOOT_ATTEMPT"
"""Environment variable of ranks: how often the ranks of all machines were started before."""
COUNT = "number here"
POLL_S = 0.1


def attempt() -> int:
    """Return how often the ranks of this run were started before, in a rank."""
    return int(os.environ.get(ATTEMPT, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def shared_store(rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """Connect to the store that the launcher's environment names, for this attempt of the run alone.

    Where the launcher serves none, rank 0 does. A launcher may give a restarted run the store of the attempt before,
    with the addresses of ranks that have ended. Raises: RuntimeError if nobody answers there in time.
    """
    host, port = os.environ["MASTER_ADDR"], launcher_number("MASTER_PORT")
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = serve_store_at(host, port, num_ranks, timeout)
    else:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return PrefixStore(f"attempt-{attempt()}", store)


def rendezvous(rank: int, size: int) -> Any:
    """Wait at the store until all ranks are there; returns it. The lowest that is there says who is late.

    Raises: StoppedOnFinding (SF111) after `DEADLINE`, naming the ranks that did not come, or the store.
    """
    try:
        store = shared_store(rank, size, DEADLINE)
    except RuntimeError as error:
        finding = _no_store(rank, error)
        say(finding.as_text())
        raise StoppedOnFinding(finding) from error
    store.set(_key(rank), socket.gethostname())
    began_s = look_s = time.monotonic()
    told: list[int] = []
    store.add(COUNT, 1)
    while store.add(COUNT, 0) < size:
        time.sleep(POLL_S)
        now_s = time.monotonic()
        if now_s - look_s < LATE.total_seconds():
            continue
        look_s = now_s
        there = [one for one in range(size) if store.check([_key(one)])]
        absent = [one for one in range(size) if one not in there]
        if not absent:
            break
        finding, is_over = _absent(store, absent, there, now_s - began_s), now_s - began_s >= DEADLINE.total_seconds()
        if rank == there[0] and (is_over or absent != told):
            say(finding.as_text())
            told = absent
        if is_over:
            raise StoppedOnFinding(finding)
    return store


@contextmanager
def connecting(rank: int, backend: str) -> Iterator[None]:
    """Rank 0 says so if the ranks, which are all there, are not connected soon (SF108)."""
    cause = f"all ranks are there, and {backend} has not connected them after {LATE.total_seconds():.0f} s"
    finding = Finding("SF108", cause, {"host": socket.gethostname(), **_variables()}, CATALOGUE["SF108"].fix, 0.7)
    late = threading.Timer(LATE.total_seconds(), lambda: say(finding.as_text()))
    late.daemon = True
    if rank == 0:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _key(rank: int) -> str:
    return f"here-{rank}"


def _absent(store: Any, absent: list[int], there: list[int], waited_s: float) -> Finding:
    hosts: dict[str, list[str]] = {}
    for one in there:
        hosts.setdefault(store.get(_key(one)).decode(), []).append(str(one))
    names = ", ".join(map(str, absent))
    who = f"ranks {names}" if len(absent) > 1 else f"rank {names}"
    return Finding(
        "SF111",
        f"{who} of {len(absent) + len(there)} did not come within {waited_s:.0f} s after the others began",
        {
            "rank": absent[0],
            "absent": names,
            "there": "; ".join(f"{host}: {', '.join(ranks)}" for host, ranks in hosts.items()),
            "waited_s": round(waited_s),
        },
        "Look at what that process does: was it started, on which machine, can torch be imported there (a hung file "
        "system), do all machines have the same nnodes and rdzv_endpoint?",
    )


def _no_store(rank: int, error: RuntimeError) -> Finding:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return Finding(
        "SF111",
        f"rank {rank} finds nobody at {address}, where rank 0 or its launcher should be",
        {"rank": rank, "host": socket.gethostname(), "address": address, "error": str(error).splitlines()[0]},
        "Was rank 0 started? Is its machine reached from here by that name (MASTER_ADDR), and the port not blocked? "
        "Rank 0 listens on the interface of MASTER_ADDR alone: on its own machine that name must not be a loopback "
        "address (see /etc/hosts).",
    )


def _variables() -> dict[str, str]:
    """That say over which interfaces ranks connect."""
    return {name: os.environ[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name in os.environ}
