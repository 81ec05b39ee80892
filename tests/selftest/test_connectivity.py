"""Ports and clocks, with real sockets and a real store."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from surefoot.diagnostics.selftest import connectivity


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_listener_is_reached_and_known() -> None:
    ((address, port),) = connectivity.Listener(3, ["127.0.0.1"]).places
    assert address == "127.0.0.1"
    assert connectivity.connect(3, address, port) == ""
    assert connectivity.connect(3, address, port) == "", "it answers more than once"
    assert connectivity.connect(4, address, port) == "somebody else answers"


def test_all_are_reached_by_any_of_their_addresses(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "CONNECT_WITHIN_S", 0.3)
    ((_, port),) = connectivity.Listener(3, ["127.0.0.1"]).places
    places = {
        3: [("0.0.0.1", port), ("127.0.0.1", port)],
        4: [("127.0.0.1", 1)],
        5: [("127.0.0.1", silent)] * 40,
        6: [],
    }
    began_s = time.monotonic()
    found = connectivity.connect_to_all(places)
    assert found == {
        3: "",
        4: "127.0.0.1: Connection refused",
        5: "; ".join(["127.0.0.1: timed out"] * 40),
        6: "it has no address",
    }
    assert time.monotonic() - began_s < 40 * 0.3, "at the same time"


def test_a_machine_listens_where_it_is_named_or_where_the_machines_meet() -> None:
    assert connectivity.listening_addresses({"GLOO_SOCKET_IFNAME": "lo"}, "192.0.2.1:29500")[0] == "127.0.0.1"
    assert connectivity.listening_addresses({"GLOO_SOCKET_IFNAME": ""}, "127.0.0.1:29500") == ["127.0.0.1"]
    assert connectivity.listening_addresses({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, None) == ["127.0.0.1"]
    assert connectivity.listening_addresses({}, "no.such.machine.invalid:29500") == []


def test_addresses_are_those_of_the_interface_that_is_named() -> None:
    assert connectivity.own_addresses({"GLOO_SOCKET_IFNAME": "lo"})[0] == "127.0.0.1"
    assert connectivity.own_addresses({"NCCL_SOCKET_IFNAME": "=nothing"}) == []
    others = connectivity.own_addresses({})
    assert others == connectivity.own_addresses({"NCCL_SOCKET_IFNAME": "^docker0"})
    assert not any(address.startswith("fe80") for address in others)
    first_loopback = next(number for number, address in enumerate(others) if address in ("127.0.0.1", "::1"))
    assert all(address.startswith("127.") or address == "::1" for address in others[first_loopback:]), "these come last"
    up = {name for name, about in psutil.net_if_stats().items() if about.isup}
    known = {one.address for name in up for one in psutil.net_if_addrs()[name]}
    assert set(others) <= known


def test_the_clock_of_another_machine_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    asking = TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=20))
    real, answering = time.time, threading.Thread(target=connectivity.answer_pings, args=(host, [4]), daemon=True)

    def five_seconds_ahead_there() -> float:
        return real() + (5.0 if threading.current_thread() is answering else 0.0)

    monkeypatch.setattr(connectivity.time, "time", five_seconds_ahead_there)
    answering.start()
    offset_s, error_s = connectivity.offset_s(asking, 4)
    assert abs(offset_s - 5.0) <= error_s < 1.0
    answering.join(20)
