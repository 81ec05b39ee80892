"""Keeping gloo and NCCL on the loopback interface if all ranks of a run are on one machine."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

ADDRESS = "127.0.0.1"
ADDED = "SUREFOOT_ADDED_VARIABLES"
"""Environment variable with the names of the variables that are set here, and not by the user."""


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
    added = {name: value for name, value in loopback_variables().items() if is_needed and not os.environ.get(name)}
    if added:
        os.environ.update({**added, ADDED: ",".join(added)})
    try:
        yield
    finally:
        for name in (*added, ADDED) if added else ():
            os.environ.pop(name, None)


def variables_of_user() -> dict[str, str]:
    """Return the environment without the variables that are set here."""
    added = {ADDED, *os.environ.get(ADDED, "").split(",")}
    return {name: value for name, value in os.environ.items() if name not in added}
