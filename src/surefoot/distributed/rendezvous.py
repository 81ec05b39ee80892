"""Rendezvous of elastic's launchers before they start ranks, and the store that their ranks get.

On one machine nothing goes over the network: each round opens a TCPStore on the loopback interface. On several, the
launchers meet at `rdzv_endpoint` (`rendezvous_server`), and each relays its own ranks to the store of the round.
torch's own rendezvous is not used: it listens on every interface and unpickles what it reads.
"""

import errno
import ipaddress
import os
import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from surefoot.distributed.listening import can_connect, is_loopback, listen, serve_store
from surefoot.distributed.rendezvous_client import LOST, RendezvousClient
from surefoot.distributed.rendezvous_messages import ProtocolError, WrongSecret
from surefoot.distributed.rendezvous_secret import (
    FILE,
    VARIABLE,
    hidden_from_children,
    secret_of_environment,
    shared_secret,
)
from surefoot.distributed.rendezvous_server import ENDED, FULL, STORE_TIMEOUT, RendezvousServer
from surefoot.distributed.store import ATTEMPT
from surefoot.errors import ConfigError, SurefootError
from surefoot.system.console import say
from surefoot.system.loopback import ADDRESS as LOOPBACK

BACKEND = "surefoot"
"""Name under which elastic finds these handlers."""
RETRY_S = 0.5
SHARED_WITHIN_S = 60.0
"""Seconds that a network file system may take to show the secret on another machine."""
SILENT_WITHIN_S = 20.0
"""Seconds that a launcher may be too busy to answer, before it is taken for another service."""
FULL_WITHIN_S = 40.0
"""Seconds that a machine without power may count as one of the run."""
ATTACH_WITHIN_S = 60.0
"""Seconds that the serving launcher may be unreachable before the ranks of this machine are stopped."""


class Launch(Protocol):
    """The settings of a run that a rendezvous needs."""

    @property
    def nnodes(self) -> int: ...
    @property
    def rdzv_endpoint(self) -> str | None: ...
    @property
    def run_folder(self) -> Path: ...


@contextmanager
def rendezvous(run: Launch, purpose: str, join_within_s: float) -> Iterator[RendezvousHandler]:
    """Give elastic the rendezvous of a run, until its launcher has ended.

    `purpose`: the purpose of the machines' rendezvous, "train" or "test". Raises: ConfigError, StorageError.
    """
    try:
        handler = OneMachine() if run.nnodes == 1 else ManyMachines(run, purpose, join_within_s)
        with hidden_from_children(), handler.running():
            yield handler
    finally:
        os.environ.pop(ATTEMPT, None)


class _Rendezvous(RendezvousHandler):
    """Part of elastic's interface that both kinds of rendezvous share."""

    def __init__(self) -> None:
        self._is_closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the launcher serves the store: rank 0 opens none of its own."""
        return True

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """Run the tasks that the rendezvous needs beside the launcher."""

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
    """Rendezvous of a run whose ranks are all on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._round = 0

    def running(self) -> AbstractContextManager[object]:
        """Run no task: each round has a store of its own."""
        return nullcontext()

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of another round. Elastic keeps it until the round after it."""
        store = serve_store(listen(LOOPBACK, 0), STORE_TIMEOUT)
        os.environ[ATTEMPT] = str(self._round)
        self._round += 1
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))


class ManyMachines(_Rendezvous):
    """Rendezvous of a run on several machines, for one of its launchers."""

    def __init__(self, run: Launch, purpose: str, join_within_s: float) -> None:
        super().__init__()
        assert run.rdzv_endpoint is not None
        self._run, self._purpose, self._join_within_s = run, purpose, join_within_s
        self._endpoint = run.rdzv_endpoint
        self._host, _, port = self._endpoint.rpartition(":")
        self._port = int(port)
        self._secret = secret_of_environment()
        self._client = RendezvousClient(self._endpoint, run.run_folder, self._secret)
        self._serving = ExitStack()
        self._me = {"node": uuid.uuid4().hex, "host": socket.gethostname(), "is_server": False}
        self._lost_since_s: float | None = None

    @contextmanager
    def running(self) -> Iterator["ManyMachines"]:
        """Serve the rendezvous if the endpoint is this machine's and free; otherwise another launcher does.

        Raises: ConfigError if other machines cannot reach the endpoint; StorageError if the secret cannot be written.
        """
        with self._serving, self._client.running():
            self._serve_if_possible()
            yield self

    def _serve_if_possible(self) -> None:
        if self._me["is_server"]:
            return
        listener = self._open_own_listener()
        if listener is None:
            return
        self._serving.callback(listener.close)
        secret, source = self._secret, "environment"
        if secret is None:
            secret, source = self._serving.enter_context(shared_secret(self._run.run_folder)), "file"
        server = RendezvousServer(self._run.nnodes, self._purpose, secret, source, _report_refusal)
        self._client.serve(server, listener, secret)
        self._me["is_server"] = True

    def _open_own_listener(self) -> socket.socket | None:
        """Return a socket at the endpoint; None if it is another machine's, or another launcher has it."""
        try:
            listener = listen(self._host, self._port)
        except socket.gaierror:  # a name may resolve only some time after the machines have started
            return None
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return None
            raise ConfigError(
                f"rdzv_endpoint={self._endpoint}: this machine cannot use that address: {error.strerror or error}. "
                "Give host:port of a machine that all others reach."
            ) from error
        address = listener.getsockname()[0]
        is_own_name = is_loopback(address) and not self._is_loopback_endpoint
        if is_own_name or ipaddress.ip_address(address).is_unspecified:
            listener.close()
            reason = "where no other machine can reach it (see /etc/hosts)" if is_own_name else "every interface"
            raise ConfigError(
                f"rdzv_endpoint={self._endpoint}: on this machine {self._host} is {address}, {reason}. Give this "
                f"machine's address in the network between the machines, on all of them. It has {_own_addresses()}."
            )
        return listener

    @property
    def _is_loopback_endpoint(self) -> bool:
        return self._host == "localhost" or is_loopback(self._host)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines and return this one's number and a store for its ranks.

        Raises: ConfigError if this machine is refused; SurefootError if the others do not come in time;
        RendezvousClosedError if the run has ended.
        """
        deadline = time.monotonic() + self._join_within_s
        if self._client.round == 0:
            self._connect(deadline)
        answer = self._join(deadline)
        self._client.round = int(answer["round"])
        os.environ[ATTEMPT] = str(self._client.round - 1)
        port = int(answer["store_port"]) if self._me["is_server"] else self._client.relay_port
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=STORE_TIMEOUT)
        return RendezvousInfo(store, int(answer["rank"]), self._run.nnodes, RendezvousStoreInfo(LOOPBACK, port))

    def _connect(self, deadline: float) -> None:
        """Connect to the launcher that serves, which may start later."""
        began_s, problem = time.monotonic(), "nobody serves the rendezvous"
        while time.monotonic() < deadline:
            waited_s = time.monotonic() - began_s
            try:
                self._client.connect()
                return
            except ProtocolError as error:
                raise ConfigError(self._describe_no_rendezvous(str(error))) from error
            except WrongSecret as error:
                is_final = self._secret is not None or self._client.greeting.get("secret") == "environment"
                if is_final or waited_s > SHARED_WITHIN_S:
                    raise ConfigError(self._describe_not_started(self._describe_wrong_secret())) from error
            except TimeoutError as error:  # a silent connection: another service, or a launcher that is busy
                if waited_s > SILENT_WITHIN_S and can_connect(self._host, self._port):
                    raise ConfigError(self._describe_no_rendezvous(f"it sends nothing for {waited_s:.0f} s")) from error
            except (EOFError, OSError) as error:
                problem = f"nobody serves the rendezvous ({error})"
            self._serve_if_possible()  # the launcher that had the port may have ended
            time.sleep(RETRY_S)
        raise SurefootError(self._describe_not_started(problem))

    def _join(self, deadline: float) -> dict[str, Any]:
        request = {"request": "join", "purpose": self._purpose, "num_machines": self._run.nnodes, **self._me}
        full_until_s = time.monotonic() + FULL_WITHIN_S
        while True:
            try:
                answer = self._client.ask(request, deadline - time.monotonic())
            except TimeoutError:
                reason = f"not all {self._run.nnodes} machines (nnodes) came in time"
                if self._is_loopback_endpoint:
                    reason += f", and {self._host} is each machine itself"
                raise SurefootError(self._describe_not_started(reason)) from None
            except LOST as error:
                reason = "the launcher that served the rendezvous has ended"
                raise SurefootError(self._describe_not_started(reason)) from error
            problem, reason = answer.get("error"), str(answer.get("reason"))
            if problem is None:
                return answer
            if problem == ENDED:
                raise RendezvousClosedError(reason)
            if problem != FULL or time.monotonic() > full_until_s:
                raise ConfigError(self._describe_not_started(reason))
            time.sleep(RETRY_S)  # a machine that lost its power counts for a while
            self._connect(deadline)

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait for the ranks to be started again.

        Raises: RendezvousConnectionError if the serving launcher is lost, and does not come back.
        """
        if self._lost_since_s is not None:
            self._attach(self._lost_since_s)
        if self._lost_since_s is None:
            try:
                return int(self._client.ask({"request": "count_waiting"})["waiting"])
            except (KeyError, *LOST):
                self._lost_since_s = time.monotonic()
        return 0

    def _attach(self, lost_since_s: float) -> None:
        """Connect again to the launcher that serves. Ranks continue meanwhile: they have their own connections."""
        try:
            self._client.connect()
            answer = self._client.ask({"request": "attach", "round": self._client.round, **self._me})
            if "error" not in answer:
                self._lost_since_s = None
                return
        except (WrongSecret, *LOST):
            pass  # tried again until the deadline
        if time.monotonic() - lost_since_s > ATTACH_WITHIN_S:
            raise RendezvousConnectionError("the launcher that served the rendezvous has ended")

    def set_closed(self) -> None:
        """Close the rendezvous, so that no machine waits for another round."""
        super().set_closed()
        with suppress(*LOST):  # with the serving launcher lost, nobody can join either
            self._client.ask({"request": "close"})

    def _describe_no_rendezvous(self, reason: str) -> str:
        return (
            f"rdzv_endpoint={self._endpoint}: the program that listens there is not the rendezvous of a run: {reason}. "
            "Choose a free port."
        )

    def _describe_wrong_secret(self) -> str:
        if self._secret is not None:
            reason = f"the secret in this machine's {VARIABLE} is not the one of the launcher there"
        elif self._client.greeting.get("secret") == "environment":
            reason = f"the launcher there has its secret from {VARIABLE}, which is not set on this machine"
        else:
            reason = (
                f"this machine does not see the secret that the launcher there wrote to {self._run.run_folder}/{FILE}"
            )
        return f"{reason}. All machines must share output_dir, or have the same {VARIABLE}"

    def _describe_not_started(self, reason: str) -> str:
        return (
            f"{reason}: the ranks of this machine were not started. They meet at rdzv_endpoint={self._endpoint}: is it "
            "an address of one of the machines, is it reached from all of them, is its port free, and was the same "
            "command started on each?"
        )


def _report_refusal(address: str) -> None:
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


def _get_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler that the launch configuration carries."""
    handler: RendezvousHandler = parameters.get("handler")
    return handler


rendezvous_handler_registry.register(BACKEND, _get_handler)
