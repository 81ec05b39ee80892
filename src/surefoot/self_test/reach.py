"""Whether machines reach each other on a port of any number, and how far their clocks are apart."""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil

CONNECT_WITHIN_S = 3.0
AT_A_TIME = 128
WORD = b"surefoot "
PINGS = 5
NAMING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class Listener:
    """Accepts connections on a free port of this machine and says who it is; until the process ends."""

    def __init__(self, rank: int) -> None:
        self._said = WORD + str(rank).encode()
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        threading.Thread(target=self._answer, name="listener", daemon=True).start()

    @property
    def place(self) -> dict[str, Any]:
        return {"addresses": own_addresses(os.environ), "port": self._socket.getsockname()[1]}

    def _answer(self) -> None:
        while True:
            with suppress(OSError):  # a caller that hung up
                caller, _ = self._socket.accept()
                with caller:
                    caller.sendall(self._said)


def own_addresses(environment: Mapping[str, str]) -> list[str]:
    """Of interfaces that are up; of those alone that a variable of NCCL or gloo names. The loopback's come last."""
    named = [name for variable in NAMING if (name := environment.get(variable, "")) and not name.startswith("^")]
    wanted = tuple(one for name in named for one in name.lstrip("=").split(",") if one)
    states = psutil.net_if_stats()
    found = [
        one.address.partition("%")[0]
        for name, addresses in sorted(psutil.net_if_addrs().items())
        if name in states and states[name].isup and (not wanted or name.startswith(wanted))
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and not one.address.startswith("fe80")
    ]
    return sorted(found, key=lambda address: (ipaddress.ip_address(address).is_loopback, ":" in address))


def connect_to_all(places: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Rank -> why none of its addresses leads to its listener, or empty; all are tried at the same time."""
    pairs = [(rank, address, place["port"]) for rank, place in places.items() for address in place["addresses"]]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        problems = list(pool.map(lambda pair: connect(*pair), pairs))
    found: dict[int, str] = {}
    for rank in places:
        tried = [(pair[1], problem) for pair, problem in zip(pairs, problems, strict=True) if pair[0] == rank]
        is_reached = any(not problem for _, problem in tried)
        found[rank] = "" if is_reached else "; ".join(f"{a}: {problem}" for a, problem in tried) or "it has no address"
    return found


def connect(rank: int, address: str, port: int) -> str:
    """Empty where a rank's listener answers; else why not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_WITHIN_S) as peer:
            peer.settimeout(CONNECT_WITHIN_S)
            said = peer.recv(64)
    except OSError as error:
        return error.strerror or str(error)
    return "" if said == WORD + str(rank).encode() else "somebody else answers"  # a bridge that every machine has


def offset_s(store: Any, rank: int) -> tuple[float, float]:
    """(how far rank 0's clock is ahead of this one's, how exactly that is known), by the quickest of some questions."""
    best = (0.0, float("inf"))
    for number in range(PINGS):
        began_s = time.time()
        store.set(f"ping/{rank}/{number}", "")
        said_s = float(store.get(f"pong/{rank}/{number}"))
        ended_s = time.time()
        best = min(best, (said_s - (began_s + ended_s) / 2, (ended_s - began_s) / 2), key=lambda one: one[1])
    return best


def answer_pings(store: Any, ranks: Sequence[int]) -> None:
    """At rank 0: the time, to whom asks."""
    for rank in ranks:
        for number in range(PINGS):
            store.get(f"ping/{rank}/{number}")
            store.set(f"pong/{rank}/{number}", repr(time.time()))
