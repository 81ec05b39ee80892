"""Sockets that listen on one address. torch's own stores listen on every interface of the machine."""

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
"""Connections that may wait to be accepted: every rank of a run connects at about the same time."""


def listen(host: str, port: int) -> socket.socket:
    """Listen on the address that `host` has on this machine, and on no other.

    Raises: OSError (EADDRNOTAVAIL) if no address of the host is this machine's; (EADDRINUSE) if the port is taken.
    """
    error: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as refused:
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


def serve_store(listener: socket.socket, timeout: timedelta) -> Any:
    """Return the server of a new TCPStore that accepts its clients from `listener`, which it takes over.

    Nobody has to be connected yet. The server ends when the store is deleted.
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


def serve_store_at(host: str, port: int, timeout: timedelta) -> Any:
    """Return the server of a TCPStore that listens on the interface of `host` alone.

    A host may be this machine under an address that none of its interfaces has (a service of Kubernetes, a floating
    address): the store listens on the interface that leads there. Raises: RuntimeError if the port cannot be used.
    """
    try:
        try:
            listener = listen(host, port)
        except OSError:
            listener = listen(local_address_towards(host, port), port)
    except OSError as error:
        raise RuntimeError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return serve_store(listener, timeout)


def keep_on_this_machine() -> None:
    """Let gloo and NCCL connect the ranks over the loopback interface, unless the environment names another one.

    For ranks that are all on this machine. By default both listen on the interface of the machine's host name.
    """
    for name, value in loopback_variables().items():
        os.environ.setdefault(name, value)


def is_one_machine(num_ranks: int) -> bool:
    """Return whether the launcher's environment says that all ranks of the run are on this machine."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return os.environ["LOCAL_WORLD_SIZE"] == str(num_ranks)
    address = os.environ.get("MASTER_ADDR", "")
    return num_ranks == 1 or address == "localhost" or is_loopback(address)


def loopback_variables() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on the loopback interface; none if there is no such interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == LOOPBACK for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def is_loopback(address: str) -> bool:
    """Return whether an address reaches nothing but its own machine."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
