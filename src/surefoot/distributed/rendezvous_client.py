"""Client of a launcher: its connections to the rendezvous of its run, and the relay for its ranks."""

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from surefoot.distributed.listening import BACKLOG, listen
from surefoot.distributed.rendezvous_messages import (
    LINE_BYTES,
    ProtocolError,
    WrongSecret,
    close,
    greet_server,
    receive,
    receive_greeting,
    relay,
    send,
)
from surefoot.distributed.rendezvous_secret import read_secret
from surefoot.distributed.rendezvous_server import RendezvousServer, keep_alive
from surefoot.system.console import say
from surefoot.system.loopback import ADDRESS as LOOPBACK

CONNECT_WITHIN_S = 5.0
NEXT_ADDRESS_AFTER_S = 0.25
"""Delay until the next address of a name is tried beside one that does not answer (RFC 8305)."""
ANSWER_WITHIN_S = 30.0
LOST = (ProtocolError, EOFError, OSError)
"""Errors with which a connection to the serving launcher ends early. TimeoutError is an OSError."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")


class RendezvousClient:
    """Client that runs in an event loop of its own, in a thread; its methods are called from other threads."""

    def __init__(self, endpoint: str, run_folder: Path, secret: str | None) -> None:
        """`secret`: None to read it from the run folder, where the serving launcher writes it."""
        self._host, _, port = endpoint.rpartition(":")
        self._port = int(port)
        self._run_folder = run_folder
        self._secret = secret
        self._launcher: Connection | None = None
        self._loop: asyncio.AbstractEventLoop
        self._servers: list[asyncio.Server] = []
        self._has_reported = False
        self.greeting: dict[str, Any] = {}
        """First message of the server on the newest connection."""
        self.relay_port = 0
        """Port of this machine's loopback interface at which its ranks reach the store."""
        self.round = 0
        """Number of the round that this store belongs to."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the event loop, and relay this machine's ranks to the store."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(report_unless_cancelled)
        thread = threading.Thread(target=self._loop.run_forever, name="rendezvous", daemon=True)
        thread.start()
        try:
            listener = listen(LOOPBACK, 0)
            self.relay_port = listener.getsockname()[1]
            relaying = asyncio.start_server(self._relay_rank, sock=listener, limit=LINE_BYTES, backlog=BACKLOG)
            self._servers.append(self._call(relaying))
            yield
        finally:
            with suppress(TimeoutError):
                self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(ANSWER_WITHIN_S)
            if not thread.is_alive():
                self._loop.close()

    def serve(self, server: RendezvousServer, listener: socket.socket, secret: str) -> None:
        """Serve the rendezvous itself in this event loop."""
        self._secret = secret
        self._servers.append(self._call(server.serve(listener)))

    def connect(self) -> None:
        """Connect to the launcher that serves, in place of an earlier connection.

        Raises: WrongSecret; ProtocolError if another service is there; EOFError or OSError if nobody answers.
        """
        self._call(self._connect())

    def ask(self, request: dict[str, Any], within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        """Return the answer to a request. Raises: TimeoutError after `within_s`; one of LOST."""
        return self._call(self._ask(request), within_s)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._launcher is None:
            raise EOFError("there is no connection")
        reader, writer = self._launcher
        await send(writer, request)
        return await receive(reader, may_take_long=True)

    async def _connect(self) -> None:
        if self._launcher is not None:
            await close(self._launcher[1])
            self._launcher = None
        self._launcher = await self._open()

    async def _open(self) -> Connection:
        """Open a connection and prove the secret."""
        async with asyncio.timeout(CONNECT_WITHIN_S):
            reader, writer = await asyncio.open_connection(
                self._host, self._port, limit=LINE_BYTES, happy_eyeballs_delay=NEXT_ADDRESS_AFTER_S
            )
        try:
            keep_alive(writer)
            self.greeting = await receive_greeting(reader)
            secret = self._secret
            if secret is None:  # in a thread, because a network file system may take its time
                secret = await self._loop.run_in_executor(None, read_secret, self._run_folder)
            if secret is None:
                raise WrongSecret
            await greet_server(reader, writer, self.greeting, secret)
        except BaseException:
            await close(writer)
            raise
        self._secret = secret  # the file may be deleted from now on
        return reader, writer

    async def _relay_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a rank of this machine to the store of the round."""
        async with AsyncExitStack() as connections:
            connections.push_async_callback(close, writer)
            try:
                server = await self._open()
                connections.push_async_callback(close, server[1])
                await send(server[1], {"request": "store", "round": self.round})
                answer = await receive(server[0])
                if "error" not in answer:
                    await relay((reader, writer), server)
            except (WrongSecret, *LOST) as error:
                self._report_lost_rank(error)  # the rank sees its connection closed

    def _report_lost_rank(self, error: Exception) -> None:
        if not self._has_reported:
            self._has_reported = True
            text = f"a rank could not be connected to rdzv_endpoint ({type(error).__name__} {error})".rstrip()
            threading.Thread(target=say, args=(text,), daemon=True).start()

    async def _end(self) -> None:
        """Accept no more connections, cancel what runs in the event loop, and close all connections."""
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._launcher is not None:
            await close(self._launcher[1])

    def _call(self, work: Coroutine[Any, Any, T], within_s: float = ANSWER_WITHIN_S) -> T:
        """Run a coroutine in the event loop's thread. Raises: TimeoutError after `within_s`, and its errors."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(max(within_s, 0.0))
        finally:
            future.cancel()


def report_unless_cancelled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exception handler of the event loop. Python 3.11 reports connections that `_end` cancels as errors."""
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)
