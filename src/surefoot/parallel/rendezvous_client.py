"""A launcher's connections to the rendezvous of its run, wherever it is served, and the relay for its ranks."""

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from surefoot.errors import ConfigError, SurefootError
from surefoot.parallel.listening import LOOPBACK, listen
from surefoot.parallel.rendezvous_messages import (
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
from surefoot.parallel.rendezvous_secret import FILE, VARIABLE, read_secret, secret_of_environment
from surefoot.parallel.rendezvous_server import RendezvousServer, keep_alive

CONNECT_WITHIN_S = 5.0
RETRY_S = 0.5
SHARED_WITHIN_S = 60.0
"""How long a network file system may take to show the secret on another machine."""
ANSWER_WITHIN_S = 30.0
LOST = (ProtocolError, EOFError, OSError)
"""How a connection to the serving launcher ends before its time. TimeoutError is an OSError."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")


class RendezvousClient:
    """Works in an event loop of its own, in a thread; its methods are called from others."""

    def __init__(self, endpoint: str, run_folder: Path) -> None:
        self._endpoint, self._run_folder = endpoint, run_folder
        self._host, _, port = endpoint.rpartition(":")
        self._port = int(port)
        self._launcher: Connection | None = None
        self._loop: asyncio.AbstractEventLoop
        self._servers: list[asyncio.Server] = []
        self.relay_port = 0
        """Port of this machine's loopback interface at which its ranks reach the store."""
        self.round = 0
        """The round whose store that is."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the event loop, and relay this machine's ranks to the store."""
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="rendezvous", daemon=True)
        thread.start()
        try:
            listener = listen(LOOPBACK, 0)
            self.relay_port = listener.getsockname()[1]
            self._servers.append(self._call(asyncio.start_server(self._relay_rank, sock=listener, limit=LINE_BYTES)))
            yield
        finally:
            with suppress(TimeoutError):
                self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(ANSWER_WITHIN_S)
            if not thread.is_alive():
                self._loop.close()

    def serve(self, server: RendezvousServer, listener: socket.socket) -> None:
        """Serve the rendezvous itself in this event loop."""
        self._servers.append(self._call(server.serve(listener)))

    def connect(self, within_s: float) -> None:
        """Connect to the launcher that serves, which may start later.

        Raises: ConfigError if something else is there, or it has another secret; SurefootError after `within_s`.
        """
        if self._launcher is None:
            self._launcher = self._call(self._connect(time.monotonic() + within_s), within_s + 2 * ANSWER_WITHIN_S)

    def ask(self, request: dict[str, Any], within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        """Return the answer to a request. Raises: TimeoutError after `within_s`; one of LOST."""
        return self._call(self._ask(request), within_s)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._launcher is None:
            raise EOFError("there is no connection")
        reader, writer = self._launcher
        await send(writer, request)
        return await receive(reader, None)

    async def _connect(self, deadline: float) -> Connection:
        refused_since_s: float | None = None
        while time.monotonic() < deadline:
            greeting: dict[str, Any] = {}
            try:
                return await self._open(greeting)
            except ProtocolError as error:
                raise ConfigError(
                    f"rdzv_endpoint={self._endpoint}: what accepts connections there is not the rendezvous of a run: "
                    f"{error}. Choose a free port."
                ) from error
            except WrongSecret as error:
                refused_since_s = refused_since_s or time.monotonic()
                is_final = secret_of_environment() is not None or greeting.get("secret") == "environment"
                if is_final or time.monotonic() - refused_since_s > SHARED_WITHIN_S:
                    raise ConfigError(self._wrong_secret(greeting)) from error
            except (EOFError, OSError):
                pass  # nobody serves there yet
            await asyncio.sleep(RETRY_S)
        raise SurefootError(not_started(self._endpoint, "nobody serves the rendezvous"))

    async def _open(self, greeting: dict[str, Any]) -> Connection:
        """Open a connection and prove the secret. `greeting` receives what the server said first."""
        async with asyncio.timeout(CONNECT_WITHIN_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES)
        try:
            keep_alive(writer)
            greeting.update(await receive_greeting(reader))
            secret = secret_of_environment() or read_secret(self._run_folder)
            if secret is None:
                raise WrongSecret
            await greet_server(reader, writer, greeting, secret)
        except BaseException:
            await close(writer)
            raise
        return reader, writer

    async def _relay_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a rank of this machine to the store of the round."""
        server: Connection | None = None
        try:
            server = await self._open({})
            await send(server[1], {"request": "store", "round": self.round})
            answer = await receive(server[0])
            if "error" not in answer:
                await relay((reader, writer), server)
        except (WrongSecret, asyncio.CancelledError, *LOST):
            pass  # the rank sees its connection closed, and reports it; a cancelled task would be logged
        finally:
            await close(writer)
            if server is not None:
                await close(server[1])

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

    def _wrong_secret(self, greeting: dict[str, Any]) -> str:
        if secret_of_environment() is not None:
            reason = f"the secret in this machine's {VARIABLE} is not the one of the launcher there"
        elif greeting.get("secret") == "environment":
            reason = f"the launcher there has its secret from {VARIABLE}, which is not set on this machine"
        else:
            reason = f"this machine does not see the secret that the launcher there wrote to {self._run_folder}/{FILE}"
        return not_started(self._endpoint, f"{reason}. All machines must share output_dir, or have the same {VARIABLE}")


def not_started(endpoint: str, reason: str) -> str:
    """Return the text of an error that keeps the ranks of this machine from starting."""
    return (
        f"{reason}: the ranks of this machine were not started. They meet at rdzv_endpoint={endpoint}: is it an "
        "address of one of the machines, is it reached from all of them, is its port free, and was the same command "
        "started on each?"
    )
