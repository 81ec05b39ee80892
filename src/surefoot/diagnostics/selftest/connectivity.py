"""Tests whether machines reach each other on arbitrary ports, and how far their clocks differ."""

import ipaddress
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil

from surefoot.distributed.listening import listen, local_address_towards

CONNECT_WITHIN_S = 3.0
RETRY_S = 0.1
AT_A_TIME = 128
WORD = b"surefoot "
PINGS = 5
NAMING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class Listener:
    """Server on a free port of each given local address that sends its rank, until the process exits."""

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self._greeting = WORD + str(rank).encode()
        self._sockets = [listen(address, 0) for address in addresses]
        for listening in self._sockets:
            threading.Thread(target=self._answer, args=(listening,), name="listener", daemon=True).start()

    @property
    def places(self) -> list[tuple[str, int]]:
        """(address, port) of each socket."""
        return [listening.getsockname()[:2] for listening in self._sockets]

    def _answer(self, listening: socket.socket) -> None:
        while True:
            try:
                caller, _ = listening.accept()
            except OSError:  # no file descriptor is free
                time.sleep(RETRY_S)
                continue
            with caller, suppress(OSError):  # the caller disconnected
                caller.sendall(self._greeting)


def listening_addresses(environment: Mapping[str, str], endpoint: str | None) -> list[str]:
    """Return the addresses at which this machine should be reached by the others.

    Those of the interfaces that a variable of NCCL or gloo names; otherwise the one that leads to where the machines of
    the run meet (`endpoint`, or MASTER_ADDR).
    """
    if any(not (environment.get(variable) or "^").startswith("^") for variable in NAMING):
        return own_addresses(environment)
    host, _, port = (endpoint or "{MASTER_ADDR}:{MASTER_PORT}".format_map(environment)).rpartition(":")
    try:
        return [local_address_towards(host, int(port))]
    except OSError:
        return []


def own_addresses(environment: Mapping[str, str]) -> list[str]:
    """Return the addresses of interfaces that are up, loopback last.

    If a variable of NCCL or gloo names interfaces, all others are excluded.
    """
    settings = [name for variable in NAMING if (name := environment.get(variable, "")) and not name.startswith("^")]
    prefixes = tuple(entry for name in settings for entry in name.lstrip("=").split(",") if entry)
    states = psutil.net_if_stats()
    result = [
        entry.address.partition("%")[0]
        for name, addresses in sorted(psutil.net_if_addrs().items())
        if name in states and states[name].isup and (not prefixes or name.startswith(prefixes))
        for entry in addresses
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
    ]
    return sorted(result, key=lambda address: (ipaddress.ip_address(address).is_loopback, ":" in address))


def connect_to_all(places: Mapping[int, Sequence[tuple[str, int]]]) -> dict[int, str]:
    """Return rank -> why its listener is unreachable at all its addresses, or empty; all are tried at the same time."""
    pairs = [(rank, address, port) for rank, of_rank in places.items() for address, port in of_rank]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        problems = list(pool.map(lambda pair: connect(*pair), pairs))
    result: dict[int, str] = {}
    for rank in places:
        attempts = [(pair[1], problem) for pair, problem in zip(pairs, problems, strict=True) if pair[0] == rank]
        is_reached = any(not problem for _, problem in attempts)
        result[rank] = (
            "" if is_reached else "; ".join(f"{a}: {problem}" for a, problem in attempts) or "it has no address"
        )
    return result


def connect(rank: int, address: str, port: int) -> str:
    """Return an empty string if a rank's listener answers, or why it does not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_WITHIN_S) as peer:
            peer.settimeout(CONNECT_WITHIN_S)
            greeting = peer.recv(64)
    except OSError as error:
        return error.strerror or str(error)
    # Another process answers at an address that every machine has, such as that of a bridge.
    return "" if greeting == WORD + str(rank).encode() else "somebody else answers"


def offset_s(store: Any, rank: int) -> tuple[float, float]:
    """Return (seconds that rank 0's clock is ahead of this one, its uncertainty), from the fastest of several pings."""
    best = (0.0, float("inf"))
    for number in range(PINGS):
        began_s = time.time()
        store.set(f"ping/{rank}/{number}", "")
        rank0_s = float(store.get(f"pong/{rank}/{number}"))
        ended_s = time.time()
        best = min(best, (rank0_s - (began_s + ended_s) / 2, (ended_s - began_s) / 2), key=lambda sample: sample[1])
    return best


def answer_pings(store: Any, ranks: Sequence[int]) -> None:
    """Answer each ping of other ranks with the time of rank 0."""
    for rank in ranks:
        for number in range(PINGS):
            store.get(f"ping/{rank}/{number}")
            store.set(f"pong/{rank}/{number}", repr(time.time()))
