"""What a run listens on, and what a stranger who reaches it can do: with whole runs, real attacks, real namespaces."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import surefoot
from surefoot.distributed.rendezvous_secret import FILE, VARIABLE
from tests.support.processes import command_lines
from tests.support.runs import settings_of
from tests.support.sockets import ListeningSocket, listening_sockets, watch_sockets

UNPICKLING = Path(__file__).with_name("unpickling")
PORT = 29577
pytestmark = pytest.mark.long


@pytest.fixture
def settings(parallel_model: Callable[[str], Path], parallel_data: Path, tmp_path: Path) -> dict[str, Any]:
    return settings_of(parallel_model("llama"), parallel_data, tmp_path / "run", max_steps=3, report=False)


def start(
    settings: dict[str, Any], *command: str, verb: str = "train", name: str = "run", **environment: str
) -> "subprocess.Popen[str]":
    """Start a verb, in a namespace where `command` begins with what enters it."""
    config = Path(settings["output_dir"]).parent / f"{name}.json"
    config.write_text(json.dumps(settings))
    output = open(config.with_suffix(".log"), "w")  # noqa: SIM115 - a file, because nobody reads a pipe meanwhile
    own = {name: value for name, value in os.environ.items() if name != "SUREFOOT_SUPERVISED"}
    options = ["--deep"] if verb == "doctor" else []
    arguments = [*command, sys.executable, "-m", "surefoot", verb, str(config), *options]
    with output:
        return subprocess.Popen(arguments, env={**own, **environment}, stdout=output, stderr=output, text=True)


def end_of(process: "subprocess.Popen[str]", status: int = 0) -> str:
    """Wait for the end of a process that `start` has started; return what it said."""
    process.wait(120)
    config = next(Path(text) for text in list(process.args) if str(text).endswith(".json"))  # type: ignore[arg-type]
    output = config.with_suffix(".log").read_text()
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output


@pytest.mark.parametrize(
    ("ranks", "verb"),
    [
        (2, "train"),
        pytest.param(1, "train", marks=pytest.mark.matrix),
        pytest.param(2, "doctor", marks=pytest.mark.matrix),
    ],
)
def test_a_run_on_one_machine_listens_on_the_loopback_interface_alone(
    settings: dict[str, Any], ranks: int, verb: str
) -> None:
    """The supervisor, the run, its ranks, and all that they start."""
    process = start({**settings, "nproc_per_node": ranks}, verb=verb)
    sockets = watch_sockets(process, within_s=180)
    end_of(process)
    assert {socket for socket in sockets if not socket.is_loopback} == set()
    commands = {socket.command for socket in sockets}
    assert ("surefoot.launch.rank_process" in commands) == (ranks > 1), "the test sees what ranks listen on"


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_written_to_the_store_of_a_run_is_never_read(settings: dict[str, Any], tmp_path: Path) -> None:
    """Over the loopback interface, as another user of the machine: no other address reaches it."""
    process = start({**settings, "nproc_per_node": 2, "max_steps": 60})
    deadline = time.monotonic() + 120
    attacked: set[int] = set()
    payload = pickle.dumps(Bomb(tmp_path / "executed"))
    while process.poll() is None:
        assert time.monotonic() < deadline
        for port in {found.port for found in _sockets_of_launcher(process.pid)} - attacked:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
            attacked.add(port)
            for key in (*store.list_keys(), "torch.rendezvous.surefoot", "torch.rendezvous", "anything"):
                store.set(f"{key}-", payload)
                if "rendezvous" in key:
                    store.set(key, payload)
        time.sleep(0.05)
    end_of(process)
    assert attacked, "there was a store to attack"
    assert not (tmp_path / "executed").exists()


def _sockets_of_launcher(supervisor: int) -> set[ListeningSocket]:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return {
        found
        for child in children
        for found in listening_sockets(int(child))
        if found.command == "surefoot.launch.run_process"
    }


@pytest.mark.parametrize(
    "changes", [{"tuning": "full", "zero_stage": 3}, pytest.param({"zero_stage": 2}, marks=pytest.mark.matrix)]
)
def test_nothing_that_comes_from_another_rank_is_unpickled(
    settings: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Neither by Surefoot nor by torch's object collectives. A run is trained, evaluated, saved and resumed."""
    log = tmp_path / "unpickled"
    log.touch()
    changes = {**changes, "nproc_per_node": 2, "save_steps": 1, "eval_dataset": settings["dataset"]}
    watched = {"PYTHONPATH": str(UNPICKLING), "UNPICKLED": str(log)}
    end_of(start({**settings, **changes}, **watched))
    (Path(settings["output_dir"]) / "checkpoints" / "step-00000003").rename(tmp_path / "set aside")
    end_of(start({**settings, **changes}, **watched))
    assert (Path(settings["output_dir"]) / "checkpoints" / "step-00000003").is_dir(), "the second run resumed"
    stacks = log.read_text().split("=" * 20 + "\n")
    assert [stack for stack in stacks if "torch/distributed" in stack or "surefoot/distributed" in stack] == []


def test_unpickling_by_torch_would_be_seen(tmp_path: Path) -> None:
    """The log of the test above does see an object collective."""
    log = tmp_path / "unpickled"
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_gather_object([None], 'word')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(UNPICKLING), "UNPICKLED": str(log)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60, capture_output=True)
    assert "torch/distributed" in log.read_text()


@dataclass(frozen=True)
class Namespace:
    """A network namespace that stands for a machine: its own interfaces, the files of this machine."""

    name: str
    address: str

    @property
    def enter(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


@pytest.fixture
def machines() -> Iterator[list[Namespace]]:
    """Two machines and a stranger on one network."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command `ip`")
    namespaces = [Namespace(f"surefoot-{os.getpid()}-{number}", f"10.213.7.{number}") for number in (1, 2, 3)]
    bridge = f"sf-{os.getpid()}"[:15]

    def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=check, timeout=20)

    if ip("netns", "add", f"{bridge}-probe", check=False).returncode != 0:
        pytest.skip("this system lets nobody make network namespaces")
    ip("netns", "delete", f"{bridge}-probe")
    try:
        hub = namespaces[0].name + "-hub"  # a namespace of its own: nothing is added to those of this machine
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", bridge, "type", "bridge")
        ip("-n", hub, "link", "set", bridge, "up")
        for number, namespace in enumerate(namespaces):
            ip("netns", "add", namespace.name)
            ip("-n", namespace.name, "link", "set", "lo", "up")
            ip(
                "-n",
                namespace.name,
                "link",
                "add",
                "net0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{number}",
                "netns",
                hub,
            )
            ip("-n", hub, "link", "set", f"port{number}", "master", bridge, "up")
            ip("-n", namespace.name, "address", "add", f"{namespace.address}/24", "dev", "net0")
            ip("-n", namespace.name, "link", "set", "net0", "up")
        yield namespaces
    finally:
        for name in (*(namespace.name for namespace in namespaces), namespaces[0].name + "-hub"):
            ip("netns", "delete", name, check=False)


def on_two_machines(settings: dict[str, Any], machines: list[Namespace]) -> dict[str, Any]:
    return {**settings, "nnodes": 2, "rdzv_endpoint": f"{machines[0].address}:{PORT}"}


ATTACK = f"""
import json, socket, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
address = sys.argv[1]
deadline = time.monotonic() + 60
while True:
    try:
        connection = socket.create_connection((address, {PORT}), timeout=5)
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
with connection, connection.makefile("rwb") as lines:
    json.loads(lines.readline())
    proof = json.dumps({{"challenge": "0" * 64, "proof": "0" * 64}}).encode()
    lines.write(proof + b"\\n" + b'{{"request": "store", "round": 1}}\\n')
    lines.flush()
    print("answer", lines.read().decode().strip())
try:
    TCPStore(address, {PORT}, is_master=False, timeout=timedelta(seconds=3))
except Exception:
    print("no store")
"""
"""What a stranger on the network tries: a proof without the secret, and torch's own protocol."""


@pytest.mark.matrix
def test_two_machines_listen_on_the_network_between_them_alone_and_let_no_stranger_in(
    settings: dict[str, Any], machines: list[Namespace]
) -> None:
    """gloo's connections, which it makes between the ranks, are on that network too: they carry tensors alone."""
    shared = {**on_two_machines(settings, machines), "max_steps": 30}
    processes = [
        start(shared, *machine.enter, name=f"machine{number}", GLOO_SOCKET_IFNAME="net0")
        for number, machine in enumerate(machines[:2])
    ]
    attack = subprocess.Popen(
        [*machines[2].enter, sys.executable, "-c", ATTACK, machines[0].address],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    sockets = watch_sockets(*processes, within_s=240)
    outputs = [end_of(process) for process in processes]
    stranger, _ = attack.communicate(timeout=240)
    assert 'answer {"error": "wrong secret"}' in stranger
    assert "no store" in stranger
    assert re.search(f"{machines[2].address} to rdzv_endpoint .*refused", outputs[0])
    beyond = {found for found in sockets if not found.is_loopback}
    assert {found.address for found in beyond} <= {machine.address for machine in machines[:2]}
    launchers = {(found.address, found.port) for found in beyond if found.command == "surefoot.launch.run_process"}
    assert launchers == {(machines[0].address, PORT)}
    assert {found.command for found in beyond} == {"surefoot.launch.run_process", "surefoot.launch.rank_process"}
    assert not (Path(settings["output_dir"]) / FILE).exists()


@pytest.mark.matrix
def test_two_machines_are_examined_over_the_network_between_them_alone(
    settings: dict[str, Any], machines: list[Namespace]
) -> None:
    shared = on_two_machines(settings, machines)
    processes = [
        start(shared, *machine.enter, verb="doctor", name=f"machine{number}", GLOO_SOCKET_IFNAME="net0")
        for number, machine in enumerate(machines[:2])
    ]
    sockets = watch_sockets(*processes, within_s=240)
    outputs = [end_of(process) for process in processes]
    assert any("machines reach each other" in output for output in outputs)
    beyond = {found.address for found in sockets if not found.is_loopback}
    assert beyond == {machine.address for machine in machines[:2]}


@pytest.mark.matrix
def test_machines_that_share_no_folder_need_the_secret_from_the_environment(
    settings: dict[str, Any], machines: list[Namespace], tmp_path: Path
) -> None:
    shared = on_two_machines(settings, machines)
    other = {**shared, "output_dir": str(tmp_path / "elsewhere")}
    secret = {VARIABLE: "the secret of this run"}
    first = start(shared, *machines[0].enter, name="first", GLOO_SOCKET_IFNAME="net0", **secret)
    second = start(other, *machines[1].enter, name="second", GLOO_SOCKET_IFNAME="net0")
    try:
        assert VARIABLE in end_of(second, status=2)
        assert not (tmp_path / "elsewhere").exists()
    finally:
        first.terminate()
        first.wait(60)


@pytest.mark.matrix
def test_a_rank_that_dies_on_one_machine_restarts_those_of_both(
    settings: dict[str, Any], machines: list[Namespace]
) -> None:
    shared = {**on_two_machines(settings, machines), "max_steps": 40, "save_steps": 1, "max_restarts": 1}
    processes = [
        start(shared, *machine.enter, name=f"machine{number}", GLOO_SOCKET_IFNAME="net0")
        for number, machine in enumerate(machines[:2])
    ]
    metrics = Path(settings["output_dir"]) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    _kill_rank(processes[1].pid)
    outputs = [end_of(process) for process in processes]
    assert "SF101" in outputs[1]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 41)), "it went on from what was saved"


def _kill_rank(supervisor: int) -> None:
    (rank,) = [child for child, line in command_lines(supervisor).items() if "surefoot.launch.rank_process" in line]
    rank.kill()


@pytest.mark.parametrize("name", ["import pickle", "torch.load(", "gather_object", "object_list", "import marshal"])
def test_the_source_unpickles_nothing(name: str) -> None:
    source = Path(surefoot.__file__).parent
    assert [path for path in source.rglob("*.py") if name in path.read_text()] == []
