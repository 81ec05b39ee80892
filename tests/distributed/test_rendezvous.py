"""The rendezvous of several machines, with real sockets: who is let in, and what machines learn of each other."""

import asyncio
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
)

from surefoot.distributed import rendezvous, rendezvous_messages
from surefoot.distributed.listening import has_ranks_elsewhere, is_one_machine, serve_store_at
from surefoot.distributed.rendezvous_client import RendezvousClient
from surefoot.distributed.rendezvous_secret import FILE, VARIABLE, read_secret
from surefoot.distributed.rendezvous_server import UNPROVEN_CONNECTIONS
from surefoot.distributed.store import ATTEMPT
from surefoot.errors import ConfigError, SurefootError
from tests.support.sockets import listening_sockets


@dataclass(frozen=True)
class Run:
    nnodes: int
    rdzv_endpoint: str | None
    run_folder: Path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Run(2, f"127.0.0.1:{port}", tmp_path / "folder" / "run")


@pytest.fixture
def open_rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RendezvousHandler]]:
    """Open a rendezvous as one more launcher, until the test ends."""
    monkeypatch.delenv(VARIABLE, raising=False)  # and is undone after the launchers have given the secret back
    with ExitStack() as stack:

        def open_one(run: Run, purpose: str = "train", join_within_s: float = 20.0) -> RendezvousHandler:
            return stack.enter_context(rendezvous.rendezvous(run, purpose, join_within_s))

        yield open_one


def join_all(*launchers: RendezvousHandler) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(launchers)) as pool:
        return list(pool.map(lambda launcher: launcher.next_rendezvous(), launchers))


def address_of(run: Run) -> tuple[str, int]:
    assert run.rdzv_endpoint is not None
    host, _, port = run.rdzv_endpoint.rpartition(":")
    return host, int(port)


def test_machines_are_numbered_and_share_a_store(run: Run, open_rendezvous: Callable[..., RendezvousHandler]) -> None:
    launchers = [open_rendezvous(run), open_rendezvous(run)]
    first, second = join_all(*launchers)
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2), "the machine at the endpoint is the first"
    first.store.set("word", "text")
    assert second.store.get("word") == b"text"
    for info in (first, second):
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_addr == "127.0.0.1", "ranks reach the store through their own launcher"
    assert os.environ[ATTEMPT] == "0"


def test_a_machine_that_starts_again_is_waited_for_and_each_round_has_a_store_of_its_own(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler]
) -> None:
    launchers = [open_rendezvous(run), open_rendezvous(run)]
    join_all(*launchers)[0].store.set("word", "old")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(launchers[1].next_rendezvous)
        deadline = time.monotonic() + 20
        while launchers[0].num_nodes_waiting() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not second.done()
        first = launchers[0].next_rendezvous()
        assert (first.rank, second.result(20).rank) == (0, 1)
    assert launchers[0].num_nodes_waiting() == 0
    assert not first.store.check(["word"])
    assert os.environ[ATTEMPT] == "1", "the same on all machines, whoever failed"


def test_the_secret_is_new_private_and_deleted(run: Run) -> None:
    secrets = []
    for _ in range(2):
        with rendezvous.rendezvous(run, "train", 5.0):
            path = run.run_folder / FILE
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            secret = read_secret(run.run_folder)
            assert secret is not None
            assert len(secret) == 64
            secrets.append(secret)
        assert not run.run_folder.parent.exists(), "folders that were made for it are gone"
    assert secrets[0] != secrets[1]


def test_who_has_another_secret_is_refused_and_the_machines_go_on(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "the secret of this run")
    first = open_rendezvous(run)
    monkeypatch.setenv(VARIABLE, "the secret of this run")  # an open rendezvous hides it from children
    second = open_rendezvous(run)
    assert not (run.run_folder / FILE).exists(), "it is written nowhere"
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(first.next_rendezvous)
        time.sleep(0.5)
        monkeypatch.setenv(VARIABLE, "the secret of a stranger")
        with pytest.raises(ConfigError, match=f"{VARIABLE} is not the one"):
            open_rendezvous(run).next_rendezvous()
        assert second.next_rendezvous().rank == 1
        assert joined.result(20).rank == 0


@pytest.mark.parametrize(("secret", "numbers"), [("short", "5 characters, 5"), ("a" * 20, "20 characters, 1")])
def test_a_secret_that_is_easy_to_guess_is_refused(
    run: Run,
    open_rendezvous: Callable[..., RendezvousHandler],
    monkeypatch: pytest.MonkeyPatch,
    secret: str,
    numbers: str,
) -> None:
    monkeypatch.setenv(VARIABLE, secret)
    with pytest.raises(ConfigError, match=f"{VARIABLE} has {numbers}.*at least 16"):
        open_rendezvous(run)


def test_children_do_not_get_the_secret(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "the secret of this run")
    with rendezvous.rendezvous(run, "train", 5.0):
        assert VARIABLE not in os.environ
    assert os.environ[VARIABLE] == "the secret of this run"


def test_a_secret_that_is_deleted_after_the_start_is_not_needed_any_more(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler]
) -> None:
    launchers = [open_rendezvous(run), open_rendezvous(run)]
    join_all(*launchers)
    (run.run_folder / FILE).unlink()
    first, second = join_all(*launchers)
    first.store.set("word", "text")
    assert second.store.get("word") == b"text"


def test_machines_that_do_not_share_the_folder_are_named(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rendezvous, "SHARED_WITHIN_S", 1.0)
    open_rendezvous(run)
    other = open_rendezvous(Run(2, run.rdzv_endpoint, tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=f"elsewhere/{FILE}.*output_dir.*{VARIABLE}"):
        other.next_rendezvous()


@pytest.mark.parametrize(
    ("run_changes", "purpose", "reason"),
    [
        ({}, "test", "to train, not to test"),
        ({"nnodes": 3}, "train", "nnodes=2, not 3"),
    ],
)
def test_launchers_of_another_command_are_refused(
    run: Run,
    open_rendezvous: Callable[..., RendezvousHandler],
    run_changes: dict[str, Any],
    purpose: str,
    reason: str,
) -> None:
    open_rendezvous(run)
    other = Run(**{"nnodes": 2, "rdzv_endpoint": run.rdzv_endpoint, "run_folder": run.run_folder, **run_changes})
    with pytest.raises(ConfigError, match=reason):
        open_rendezvous(other, purpose).next_rendezvous()


def test_a_run_that_is_complete_takes_no_further_machine(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FULL_WITHIN_S", 1.0)
    launchers = [open_rendezvous(run), open_rendezvous(run)]
    join_all(*launchers)
    with pytest.raises(ConfigError, match="all its 2 machines"):
        open_rendezvous(run).next_rendezvous()
    assert launchers[0].num_nodes_waiting() == 0, "its ranks are not started again"


def test_a_run_that_was_given_up_is_waited_for_by_nobody(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler]
) -> None:
    launchers = [open_rendezvous(run), open_rendezvous(run)]
    join_all(*launchers)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(launchers[0].next_rendezvous)
        time.sleep(0.2)
        launchers[1].set_closed()
        with pytest.raises(RendezvousClosedError, match="has ended"):
            waiting.result(20)


def test_a_serving_launcher_that_ends_is_noticed(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "ATTACH_WITHIN_S", 0.5)
    with ExitStack() as serving:
        first = serving.enter_context(rendezvous.rendezvous(run, "train", 20.0))
        second = open_rendezvous(run)
        join_all(first, second)
    assert second.num_nodes_waiting() == 0, "ranks get a moment to report why"
    time.sleep(0.6)
    with pytest.raises(RendezvousConnectionError):
        second.num_nodes_waiting()


def test_a_connection_that_is_lost_is_made_again(run: Run, open_rendezvous: Callable[..., RendezvousHandler]) -> None:
    launchers = [open_rendezvous(run), open_rendezvous(run)]
    join_all(*launchers)
    client = launchers[1]._client  # type: ignore[attr-defined]
    client._loop.call_soon_threadsafe(client._launcher[1].transport.abort)
    time.sleep(0.2)
    assert [launchers[1].num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(launchers[0].next_rendezvous)
        deadline = time.monotonic() + 20
        while launchers[1].num_nodes_waiting() == 0:
            assert time.monotonic() < deadline
        assert launchers[1].next_rendezvous().rank == 1
        assert first.result(20).rank == 0


def test_a_launcher_serves_once_the_one_before_it_has_left_the_port(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler]
) -> None:
    with socket.create_server(address_of(run)) as earlier:
        launchers = [open_rendezvous(run), open_rendezvous(run)]
        with ThreadPoolExecutor(2) as pool:
            joined = [pool.submit(launcher.next_rendezvous) for launcher in launchers]
            time.sleep(0.5)
            earlier.close()
            assert sorted(future.result(30).rank for future in joined) == [0, 1]


def test_a_machine_waits_for_the_one_that_serves(
    tmp_path: Path, open_rendezvous: Callable[..., RendezvousHandler]
) -> None:
    """TEST-NET-1 belongs to no machine, so nobody serves there."""
    alone = open_rendezvous(Run(2, "192.0.2.1:29500", tmp_path / "run"), join_within_s=1.0)
    with pytest.raises(SurefootError, match="nobody serves") as raised:
        alone.next_rendezvous()
    assert not isinstance(raised.value, ConfigError)


def hello(address: tuple[str, int]) -> tuple[socket.socket, dict[str, Any]]:
    connection = socket.create_connection(address, timeout=20)
    return connection, json.loads(connection.makefile().readline())


@pytest.mark.parametrize(
    "text",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95\n",
        b"[" * 10_000 + b"\n",
        b"x" * 100_000,
        b'{"challenge": "\\ud800", "proof": "\\ud800"}\n',
        b'{"challenge": 1, "proof": null}\n',
        json.dumps({"challenge": "0" * 64, "proof": "0" * 64}).encode() + b'\n{"request": "join"}\n',
    ],
)
def test_strangers_learn_nothing_and_hinder_nobody(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], text: bytes
) -> None:
    first = open_rendezvous(run)
    stranger, greeting = hello(address_of(run))
    assert greeting.keys() == {"surefoot", "challenge", "secret"}
    rest = b""
    with stranger, suppress(ConnectionResetError, BrokenPipeError):  # how a server closes that has not read everything
        stranger.sendall(text)
        while answer := stranger.recv(1000):
            rest += answer
    assert rest in (b"", b'{"error": "wrong secret"}\n')
    assert [info.rank for info in join_all(first, open_rendezvous(run))] == [0, 1]


def test_silent_connections_are_bounded_and_keep_no_machine_out(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler]
) -> None:
    """A stranger holds as many as it can, from another address than the machines."""
    first = open_rendezvous(run)
    with ExitStack() as open_connections:
        for _ in range(400):
            stranger = socket.create_connection(address_of(run), source_address=("127.0.0.9", 0))
            open_connections.enter_context(stranger)
        time.sleep(0.5)
        port = address_of(run)[1]
        connections = psutil.Process().net_connections("tcp")
        held_by_server = sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in connections)
        assert 0 < held_by_server <= UNPROVEN_CONNECTIONS + 2
        assert [info.rank for info in join_all(first, open_rendezvous(run))] == [0, 1]


def test_a_connection_that_says_nothing_is_closed(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_messages, "ANSWER_WITHIN_S", 0.3)
    open_rendezvous(run)
    stranger, _ = hello(address_of(run))
    with stranger:
        assert stranger.recv(1) == b""


def test_a_server_that_does_not_know_the_secret_is_not_believed(
    run: Run, open_rendezvous: Callable[..., RendezvousHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers the client's proof with its own words."""
    monkeypatch.setenv(VARIABLE, "the secret of this run")
    received: list[str] = []

    def pretend(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile() as lines:
            connection.sendall(json.dumps({"surefoot": 1, "challenge": "0" * 64, "secret": "file"}).encode() + b"\n")
            proof = json.loads(lines.readline())["proof"]
            connection.sendall(json.dumps({"proof": proof}).encode() + b"\n")
            received.append(lines.readline())

    with socket.create_server(address_of(run)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(ConfigError, match=f"{VARIABLE} is not the one"):
            open_rendezvous(run).next_rendezvous()
        thread.join(20)
    assert received == [""], "it is told nothing further"


def test_a_launch_that_ends_while_a_rank_is_being_disconnected_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay of the rank waits for bytes that the rank never takes, and is cancelled there."""
    secret = "the secret of this run"

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await rendezvous_messages.greet_client(reader, writer, secret, "file")
        await rendezvous_messages.receive(reader)
        await rendezvous_messages.send(writer, {})
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(2**16))
                await writer.drain()
        await rendezvous_messages.close(writer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        stack.callback(loop.close)
        stack.callback(thread.join, 20)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        asyncio.run_coroutine_threadsafe(asyncio.start_server(flood, sock=listener), loop).result(20)

        client = RendezvousClient(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path, secret)
        with client.running():
            rank = stack.enter_context(socket.create_connection(("127.0.0.1", client.relay_port)))
            assert rank.recv(1) == b"\0"
            time.sleep(0.5)  # until no more bytes can be sent to the rank
            rank.shutdown(socket.SHUT_WR)
            time.sleep(0.5)
    assert caplog.text == ""


def test_a_name_that_is_loopback_on_its_own_machine_is_refused(
    open_rendezvous: Callable[..., RendezvousHandler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts gives the machine's own name 127.0.1.1."""
    resolve = socket.getaddrinfo

    def resolved(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.1.1" if host == "node0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(ConfigError, match=r"rdzv_endpoint=node0:29517: .*node0 is 127\.0\.1\.1,"):
        open_rendezvous(Run(2, "node0:29517", tmp_path / "run"))


def test_an_endpoint_of_every_interface_is_refused(
    open_rendezvous: Callable[..., RendezvousHandler], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"rdzv_endpoint=0\.0\.0\.0:29518: .*0\.0\.0\.0, "):
        open_rendezvous(Run(2, "0.0.0.0:29518", tmp_path / "run"))


@pytest.mark.parametrize(
    ("environment", "is_one", "is_elsewhere"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, True, False),
        ({"LOCAL_WORLD_SIZE": "2"}, False, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True, False),
        ({"SLURM_STEP_NUM_NODES": "1"}, True, False),
        ({"SLURM_STEP_NUM_NODES": "2"}, False, True),
        ({"MASTER_ADDR": "localhost"}, False, False),
    ],
)
def test_launchers_say_where_the_ranks_are(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_one: bool, is_elsewhere: bool
) -> None:
    """The last of them says neither: some give rank 0 alone that address, and its peers another one."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_one_machine(4), has_ranks_elsewhere(4)) == (is_one, is_elsewhere)


@pytest.mark.parametrize(("ranks_here", "is_loopback"), [("4", True), ("2", False)])
def test_the_store_of_rank_0_is_where_its_peers_reach_it(
    monkeypatch: pytest.MonkeyPatch, ranks_here: str, is_loopback: bool
) -> None:
    """Under a launcher that gives rank 0 the address localhost, also where others are on other machines."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        store = serve_store_at("localhost", port, 4, timedelta(seconds=10))
    except RuntimeError:
        assert not is_loopback
        pytest.skip("this machine has no route to other networks")
    (found,) = {found for found in listening_sockets(os.getpid()) if found.port == port}
    assert found.is_loopback == is_loopback
    del store
