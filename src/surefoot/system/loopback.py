"""Keeping gloo and NCCL on the loopback interface if all ranks of a run are on one machine."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from surefoot.system.added_variables import add_variables, remove_variables

ADDRESS = "127.0.0.1"


def loopback_variables() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on the loopback interface; none if there is no such interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == ADDRESS for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


@contextmanager
def kept_on_this_machine(*, is_needed: bool = True) -> Iterator[None]:
    """Make gloo and NCCL connect ranks over the loopback interface, unless the environment names another one.

    By default both listen on the interface of the machine's host name.
    """
    added = add_variables(loopback_variables() if is_needed else {})
    try:
        yield
    finally:
        remove_variables(added)
