"""Server of the rendezvous of a run on several machines: one launcher serves at `rdzv_endpoint`, all launchers join.

It counts the machines, numbers them, and opens one TCPStore per round for their ranks. The store itself listens on the
loopback interface: requests of other machines come through connections whose launchers have proven the secret.
"""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from surefoot.distributed.listening import BACKLOG, listen, serve_store
from surefoot.distributed.rendezvous_messages import (
    LINE_BYTES,
    ProtocolError,
    WrongSecret,
    close,
    greet_client,
    receive,
    relay,
    send,
)
from surefoot.system.loopback import ADDRESS as LOOPBACK

UNPROVEN_CONNECTIONS = 64
"""Number of connections that may be in their handshake at the same time. One more closes the oldest connection of the
address with the most of them."""
STORE_TIMEOUT = timedelta(minutes=10)
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds after which a machine without power is noticed: about 25."""
OTHER, ENDED, FULL = "other run", "ended", "full"
"""Reasons to refuse a launcher: it joins another run; this run has ended; it has all its machines, for now."""
LOST = (ProtocolError, EOFError, OSError)
"""Errors with which a connection ends early. TimeoutError is an OSError."""


@dataclass
class Machine:
    """A launcher that has joined."""

    node: str
    """Random name of the launcher's process."""
    host: str
    is_server: bool
    writer: asyncio.StreamWriter
    is_waiting: bool = True
    """Whether it waits for the next round; otherwise it is in the current one."""


class RendezvousServer:
    """Server in the event loop of the launcher that serves."""

    def __init__(
        self, num_machines: int, purpose: str, secret: str, secret_source: str, on_refusal: Callable[[str], None]
    ) -> None:
        """`purpose`: the purpose of the machines' rendezvous; launchers with another one are refused.

        `on_refusal`: called with the first address that did not know the secret.
        """
        self._num_machines, self._purpose = num_machines, purpose
        self._secret, self._secret_source = secret, secret_source
        self._on_refusal: Callable[[str], None] | None = on_refusal
        self._machines: dict[str, Machine] = {}
        self._round = 0
        self._ranks: dict[str, int] = {}
        self._store: Any = None
        self._is_closed = False
        self._changed = asyncio.Condition()
        self._unproven: dict[asyncio.StreamWriter, str] = {}
        """Connections in their handshake, oldest first, and the address that each is from."""

    async def serve(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections until the returned server is closed."""
        return await asyncio.start_server(self._accept, sock=listener, limit=LINE_BYTES, backlog=BACKLOG)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer)
        address = str(writer.get_extra_info("peername", ("unknown",))[0])
        try:
            self._make_room()
            self._unproven[writer] = address
            try:
                await greet_client(reader, writer, self._secret, self._secret_source)
            finally:
                self._unproven.pop(writer, None)
            await self._answer(reader, writer)
        except WrongSecret:
            if self._on_refusal is not None:  # in a thread, because a terminal may block
                threading.Thread(target=self._on_refusal, args=(address,), daemon=True).start()
                self._on_refusal = None
        except LOST:
            pass  # the launcher itself reports how its run ended
        finally:
            await close(writer)

    def _make_room(self) -> None:
        """Close a connection if too many are in their handshake."""
        if len(self._unproven) >= UNPROVEN_CONNECTIONS:
            crowded, _ = Counter(self._unproven.values()).most_common(1)[0]
            oldest = next(writer for writer, address in self._unproven.items() if address == crowded)
            del self._unproven[oldest]
            oldest.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a launcher that has proven the secret."""
        machine: Machine | None = None
        try:
            while True:
                message = await receive(reader, may_take_long=True)
                request = message.get("request")
                if request == "store":
                    await self._connect_to_store(message, reader, writer)
                    return
                if request == "join":
                    machine = await self._join(message, writer)
                    if machine is None:
                        return
                    await self._wait_for_round(machine, reader)
                elif request == "attach":
                    machine = await self._attach(message, writer)
                    if machine is None:
                        return
                elif request == "count_waiting":
                    waiting = sum(other.is_waiting for other in self._machines.values())
                    await send(writer, {"waiting": waiting})
                elif request == "close":
                    async with self._changed:
                        self._is_closed = True
                        self._changed.notify_all()
                    await send(writer, {})
                else:
                    raise ProtocolError(f"unknown request {request!r}")
        finally:
            if machine is not None and self._machines.get(machine.node) is machine:
                del self._machines[machine.node]

    async def _join(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Machine | None:
        """Register a launcher for the next round; None if it was refused, with the reason sent."""
        node, host = str(message.get("node")), str(message.get("host"))
        others = [name for name in self._machines if name != node]
        refusal: tuple[str, str] | None = None
        if message.get("purpose") != self._purpose:
            refusal = OTHER, f"the machines there come together to {self._purpose}, not to {message.get('purpose')}"
        elif message.get("num_machines") != self._num_machines:
            refusal = OTHER, f"the machines there have nnodes={self._num_machines}, not {message.get('num_machines')}"
        elif self._is_closed:
            refusal = ENDED, "the run there has ended"
        elif len(others) >= self._num_machines:
            refusal = FULL, f"the run there has all its {self._num_machines} machines"
        if refusal is not None:
            await send(writer, {"error": refusal[0], "reason": refusal[1]})
            return None
        machine = Machine(node, host, message.get("is_server") is True, writer)
        self._machines.pop(node, None)
        async with self._changed:
            self._machines[node] = machine
            if len(self._machines) == self._num_machines and all(m.is_waiting for m in self._machines.values()):
                self._begin_round()
            self._changed.notify_all()
        return machine

    async def _attach(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Machine | None:
        """Take back a launcher of the current round whose connection was lost; None if its round is over."""
        node = str(message.get("node"))
        if self._is_closed or message.get("round") != self._round or node not in self._ranks:
            await send(writer, {"error": ENDED, "reason": f"round {message.get('round')} is over"})
            return None
        machine = Machine(node, str(message.get("host")), message.get("is_server") is True, writer, is_waiting=False)
        self._machines[node] = machine
        await send(writer, {})
        return machine

    def _begin_round(self) -> None:
        """Number the machines, the server's first, and open a store for their ranks."""
        self._store = None  # the store of the round before, whose ranks have ended
        self._store = serve_store(listen(LOOPBACK, 0), STORE_TIMEOUT)
        self._round += 1
        machines = sorted(self._machines.values(), key=lambda m: (not m.is_server, m.host, m.node))
        self._ranks = {machine.node: rank for rank, machine in enumerate(machines)}
        for machine in machines:
            machine.is_waiting = False

    async def _wait_for_round(self, machine: Machine, reader: asyncio.StreamReader) -> None:
        """Answer a launcher once its round is complete. Raises: EOFError if it left before."""
        end = asyncio.create_task(reader.read(1))  # it sends nothing while it waits, so this ends with the connection
        round_begins = asyncio.create_task(self._wait_until_round_begins(machine))
        try:
            await asyncio.wait({end, round_begins}, return_when=asyncio.FIRST_COMPLETED)
            if not round_begins.done():
                raise EOFError("the launcher left")
            await send(machine.writer, round_begins.result())
        finally:
            for task in (end, round_begins):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _wait_until_round_begins(self, machine: Machine) -> dict[str, Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or not machine.is_waiting)
        if machine.is_waiting:
            return {"error": ENDED, "reason": "the run there has ended"}
        return {"round": self._round, "rank": self._ranks[machine.node], "store_port": self._store.port}

    async def _connect_to_store(
        self, message: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry the bytes of a rank and the store of its round."""
        if message.get("round") != self._round or self._store is None:
            await send(writer, {"error": ENDED, "reason": f"round {message.get('round')} is over"})
            return
        store = await asyncio.open_connection(LOOPBACK, self._store.port)
        try:
            await send(writer, {})
            await relay((reader, writer), store)
        finally:
            await close(store[1])


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the system notice that the machine at the other end is unreachable, and send small messages at once."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
