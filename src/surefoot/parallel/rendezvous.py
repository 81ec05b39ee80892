"""How elastic's launchers meet before they start ranks, and what store their ranks get.

On one machine nothing goes over the network: each round opens a TCPStore on the loopback interface. On several, the
launchers meet at `rdzv_endpoint` (`rendezvous_server`), and each relays its own ranks to the store of the round.
torch's own rendezvous is not used: it listens on every interface and unpickles what it reads.
"""

import errno
import os
import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from surefoot.errors import ConfigError, SurefootError
from surefoot.parallel.listening import LOOPBACK, is_loopback, listen, serve_store
from surefoot.parallel.rendezvous_client import LOST, RendezvousClient, not_started
from surefoot.parallel.rendezvous_secret import VARIABLE, secret_of_environment, shared_secret
from surefoot.parallel.rendezvous_server import STORE_TIMEOUT, RendezvousServer
from surefoot.terminal import say

BACKEND = "surefoot"
"""Name under which elastic finds these handlers."""
ATTEMPT = "SUREFOOT_ATTEMPT"
"""Environment variable of ranks: how often the ranks of all machines were started before."""
LEAVE_AFTER_S = 10.0
"""How long ranks go on after the serving launcher is lost: time for them to report why."""


class Launch(Protocol):
    """What a rendezvous needs to know of a run."""

    @property
    def nnodes(self) -> int: ...
    @property
    def rdzv_endpoint(self) -> str | None: ...
    @property
    def run_folder(self) -> Path: ...


def attempt() -> int:
    """Return how often the ranks of this run were started before, in a rank."""
    return int(os.environ.get(ATTEMPT, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


@contextmanager
def rendezvous(run: Launch, purpose: str, join_within_s: float) -> Iterator[RendezvousHandler]:
    """Give elastic the rendezvous of a run, for as long as it launches.

    `purpose`: what the machines come together for, "train" or "test". Raises: ConfigError, StorageError.
    """
    try:
        if run.nnodes == 1:
            yield OneMachine()
        else:
            with ManyMachines(run, purpose, join_within_s).running() as handler:
                yield handler
    finally:
        os.environ.pop(ATTEMPT, None)


class _Rendezvous(RendezvousHandler):
    """What both kinds have in common."""

    def __init__(self) -> None:
        self._is_closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The launcher serves the store: rank 0 opens none of its own."""
        return True

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo: ...

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return BACKEND

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class OneMachine(_Rendezvous):
    """A run whose ranks are all on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._round = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of another round. Elastic keeps it until the round after it."""
        store = serve_store(listen(LOOPBACK, 0), STORE_TIMEOUT)
        os.environ[ATTEMPT] = str(self._round)
        self._round += 1
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))


class ManyMachines(_Rendezvous):
    """A run on several machines, as one of its launchers sees it."""

    def __init__(self, run: Launch, purpose: str, join_within_s: float) -> None:
        super().__init__()
        assert run.rdzv_endpoint is not None
        self._run, self._purpose, self._join_within_s = run, purpose, join_within_s
        self._endpoint = run.rdzv_endpoint
        self._client = RendezvousClient(self._endpoint, run.run_folder)
        self._node = uuid.uuid4().hex
        self._is_server = False
        self._lost_since_s: float | None = None

    @contextmanager
    def running(self) -> Iterator["ManyMachines"]:
        """Serve the rendezvous if the endpoint is this machine's and free; otherwise another launcher does.

        Raises: ConfigError if other machines cannot reach the endpoint; StorageError if the secret cannot be written.
        """
        with ExitStack() as stack:
            secret, source = secret_of_environment(), "environment"
            listener = self._own_listener()
            if listener is not None:
                stack.callback(listener.close)
                self._is_server = True
                if secret is None:
                    secret, source = stack.enter_context(shared_secret(self._run.run_folder)), "file"
                server = RendezvousServer(self._run.nnodes, self._purpose, secret, source, _tell_of_refusal)
            stack.enter_context(self._client.running())
            if listener is not None:
                self._client.serve(server, listener)
            yield self

    def _own_listener(self) -> socket.socket | None:
        host, _, port = self._endpoint.rpartition(":")
        try:
            listener = listen(host, int(port))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return None
            raise ConfigError(
                f"rdzv_endpoint={self._endpoint}: this machine cannot use that address: {error.strerror or error}. "
                "Give host:port of a machine that all others reach."
            ) from error
        address = listener.getsockname()[0]
        if is_loopback(address) and host != "localhost" and not is_loopback(host):
            listener.close()
            raise ConfigError(
                f"rdzv_endpoint={self._endpoint}: on this machine the name {host} is {address}, where no other machine "
                f"can reach it (see /etc/hosts). Give this machine's address in the network between the machines, on "
                f"all of them. It has {_own_addresses()}."
            )
        return listener

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines and return this one's number and a store for its ranks.

        Raises: ConfigError if this machine is refused; SurefootError if the others do not come in time.
        """
        deadline = time.monotonic() + self._join_within_s
        self._client.connect(self._join_within_s)
        request = {
            "request": "join",
            "purpose": self._purpose,
            "num_machines": self._run.nnodes,
            "node": self._node,
            "host": socket.gethostname(),
            "is_server": self._is_server,
        }
        try:
            answer = self._client.ask(request, deadline - time.monotonic())
        except TimeoutError:
            reason = f"not all {self._run.nnodes} machines (nnodes) came in time"
            raise SurefootError(not_started(self._endpoint, reason)) from None
        except LOST as error:
            reason = "the launcher that served the rendezvous has ended"
            raise SurefootError(not_started(self._endpoint, reason)) from error
        if "error" in answer:
            raise ConfigError(not_started(self._endpoint, str(answer["error"])))
        self._client.round = int(answer["round"])
        os.environ[ATTEMPT] = str(self._client.round - 1)
        info = RendezvousStoreInfo(LOOPBACK, self._client.relay_port)
        store = TCPStore(info.master_addr, info.master_port, is_master=False, timeout=STORE_TIMEOUT)
        return RendezvousInfo(store, int(answer["rank"]), self._run.nnodes, info)

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait for the ranks to be started again.

        Raises: RendezvousConnectionError some time after the serving launcher was lost.
        """
        if self._lost_since_s is None:
            try:
                return int(self._client.ask({"request": "count_waiting"})["waiting"])
            except (KeyError, *LOST):
                self._lost_since_s = time.monotonic()
        if time.monotonic() - self._lost_since_s > LEAVE_AFTER_S:
            raise RendezvousConnectionError("the launcher that served the rendezvous has ended")
        return 0

    def set_closed(self) -> None:
        """Let no machine wait for another round."""
        super().set_closed()
        with suppress(*LOST):  # with the serving launcher lost, nobody can join either
            self._client.ask({"request": "close"})


def _tell_of_refusal(address: str) -> None:
    say(
        f"a connection from {address} to rdzv_endpoint was refused: it does not know the run's secret. If it is a "
        f"machine of this run, it must share output_dir or have the same {VARIABLE}. Further ones are not reported."
    )


def _own_addresses() -> str:
    """Return the addresses by which other machines may reach this one."""
    addresses = [
        f"{address.address} ({name})"
        for name, of_interface in sorted(psutil.net_if_addrs().items())
        for address in of_interface
        if address.family == socket.AF_INET and not is_loopback(address.address)
    ]
    return ", ".join(addresses) or "no other address"


def _handler_of(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler that the launch configuration carries."""
    handler: RendezvousHandler = parameters.get("handler")
    return handler


rendezvous_handler_registry.register(BACKEND, _handler_of)
