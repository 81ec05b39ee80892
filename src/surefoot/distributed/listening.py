"""Sockets that listen on one address. torch's own stores listen on every interface of the machine."""

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

BACKLOG = 128
"""Number of connections that may wait to be accepted."""
CONNECT_WITHIN_S = 5.0
RANKS_HERE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Environment variables of torchrun, DeepSpeed, Open MPI and Intel MPI: number of ranks on this machine."""
ELSEWHERE = "192.0.2.1"
"""Address of no machine (TEST-NET-1): the route towards it is the one to other networks."""


def listen(host: str, port: int) -> socket.socket:
    """Listen on the address that `host` has on this machine, and on no other.

    Raises: OSError (EADDRNOTAVAIL) if no address of the host is this machine's; (EADDRINUSE) if the port is taken.
    """
    error: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as refused:
            if refused.errno == errno.EADDRINUSE:  # another address of the host would make two servers of one run
                raise
            error = error or refused
    raise error or OSError(f"{host} has no address")


def local_address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it would reach a host. Nothing is sent.

    Raises: OSError if the host is unknown or there is no route to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def can_connect(host: str, port: int) -> bool:
    """Return whether an address accepts connections."""
    try:
        socket.create_connection((host, port), CONNECT_WITHIN_S).close()
    except OSError:
        return False
    return True


def serve_store(listener: socket.socket, timeout: timedelta) -> Any:
    """Return the server of a new TCPStore that accepts its clients from `listener`, which it takes over.

    No client has to be connected yet. The server ends when the store is deleted.
    """
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def serve_store_at(host: str, port: int, num_ranks: int, timeout: timedelta) -> Any:
    """Return the server of a TCPStore for all ranks of a run that listens on one interface, that of `host`.

    A host may be this machine under an address that none of its interfaces has (a service of Kubernetes, a floating
    address): the store listens on the interface that leads there. If the name is a loopback address here and some ranks
    are elsewhere, it listens on the interface that leads to other networks. Raises: RuntimeError if it cannot.
    """
    try:
        try:
            listener = listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            listener = listen(local_address_towards(host, port), port)
        if is_loopback(listener.getsockname()[0]) and has_ranks_elsewhere(num_ranks):
            listener.close()
            listener = listen(local_address_towards(ELSEWHERE, port), port)
    except OSError as error:
        raise RuntimeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return serve_store(listener, timeout)


def is_one_machine(num_ranks: int) -> bool:
    """Return whether the launcher's environment says that all ranks of the run are on this machine."""
    return num_ranks == 1 or _read_num_local_ranks() == num_ranks or os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def has_ranks_elsewhere(num_ranks: int) -> bool:
    """Return whether the launcher's environment says that some ranks are on other machines. It may say neither."""
    ranks_here = _read_num_local_ranks()
    is_known = ranks_here is not None or "SLURM_STEP_NUM_NODES" in os.environ
    return is_known and not is_one_machine(num_ranks)


def _read_num_local_ranks() -> int | None:
    numbers = (os.environ.get(name, "") for name in RANKS_HERE)
    return next((int(number) for number in numbers if number.isdigit()), None)


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only its own machine."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
