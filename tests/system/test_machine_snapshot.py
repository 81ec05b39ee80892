"""The snapshot of a machine: of this one, of trees as the kernel makes them, and of parts that fail or hang."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnostics.preflight.runner import changes
from surefoot.system import machine_snapshot
from surefoot.system.machine import Snapshot, read_snapshot
from surefoot.system.machine_snapshot import collect


def test_this_machine_is_known(tmp_path: Path) -> None:
    seen = collect(tmp_path / "deep" / "run", "127.0.0.1:29500")
    assert seen.unknown.keys() <= {"host_addresses"}, "only its own name may be unknown to a machine"
    assert seen.host == socket.gethostname()
    assert seen.versions["transformers"]
    assert seen.cpus["usable"] == len(os.sched_getaffinity(0))
    assert seen.memory_bytes["available"] > 0
    assert "127.0.0.1" in seen.interfaces["lo"].addresses
    assert seen.output is not None
    assert (seen.output.path, seen.output.error) == (str(tmp_path), "")
    assert list(tmp_path.iterdir()) == []
    assert seen.rendezvous == "on this machine"


def test_a_snapshot_comes_back_from_its_file(tmp_path: Path) -> None:
    seen = collect(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"machine": seen.as_dict()}))
    assert read_snapshot(tmp_path / "environment.json") == seen
    assert changes(seen, read_snapshot(tmp_path / "environment.json")) == []


def test_of_a_run_on_several_machines_each_is_compared_with_itself(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    first, second = Snapshot(host="one", kernel="6.1"), Snapshot(host="two", kernel="5.4")
    path.write_text(json.dumps({"machine": first.as_dict(), "other_machines": [second.as_dict()]}))
    assert read_snapshot(path, "two") == second
    assert read_snapshot(path, "one") == first
    assert read_snapshot(path, "three") == first


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}', '{"machine": {"interfaces": {"a": {}}}}'])
def test_a_file_that_is_no_snapshot(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.json").write_text(text)
    with pytest.raises(ValueError, match=r"environment\.json is no snapshot"):
        read_snapshot(tmp_path / "environment.json")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("line", "multiplies"),
    [
        ("flags\t\t: fpu sse avx2 avx512f avx512bw", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu sse avx2", False),
        ("model name\t: x", None),
    ],
)
def test_the_flags_of_the_processor_are_read(tmp_path: Path, line: str, multiplies: bool | None) -> None:
    root = write(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{line}\n"})
    assert collect(root=root, gpus=False).multiplies_bfloat16 is multiplies


PORTS = "sys/class/infiniband/mlx5_0/ports/1"
CLUSTER = {
    f"{PORTS}/state": "4: ACTIVE\n",
    f"{PORTS}/link_layer": "Ethernet\n",
    f"{PORTS}/rate": "400 Gb/sec (4X NDR)\n",
    f"{PORTS}/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001\n",
    f"{PORTS}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0005\n",
    f"{PORTS}/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    f"{PORTS}/gid_attrs/types/0": "IB/RoCE v1\n",
    f"{PORTS}/gid_attrs/types/3": "RoCE v2\n",
    f"{PORTS}/gid_attrs/ndevs/0": "ib0\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n",
    "proc/driver/nvidia/gpus/0000:1b:00.0/information": "",
    "proc/driver/nvidia/gpus/0000:43:00.0/information": "",
    "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2 nvidia_peermem, Live 0x0\n",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 intel_iommu=on iommu=pt\n",
    "sys/class/iommu/dmar0/name": "",
    "dev/shm/x": "",
}


def test_gpus_and_network_cards_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    seen = collect(root=write(tmp_path, CLUSTER))
    (port,) = seen.ports
    assert (port.device, port.port, port.state, port.link_layer, port.interface) == (
        "mlx5_0", 1, "ACTIVE", "Ethernet", "ib0",
    )  # fmt: skip
    assert port.gids == (
        "0:IB/RoCE v1:fe80:0000:0000:0000:0000:0000:0000:0001",
        "3:RoCE v2:0000:0000:0000:0000:0000:ffff:0a00:0005",
    )
    assert (seen.gpus, seen.peer_memory, seen.versions["driver"]) == (2, True, "580.95.05")
    assert seen.iommu == "on (intel_iommu=on iommu=pt)"


def test_a_module_that_is_not_loaded(tmp_path: Path) -> None:
    alone = {**CLUSTER, "proc/modules": "nvidia 1 2 - Live 0x0\n"}
    assert collect(root=write(tmp_path, alone)).peer_memory is False
    is_open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    assert collect(root=write(tmp_path, {**alone, "proc/driver/nvidia/version": is_open})).peer_memory is True


def test_a_part_that_fails_and_one_that_hangs_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses and a name server that is silent cannot be had here."""

    def hang() -> Any:
        time.sleep(60)

    monkeypatch.setattr(machine_snapshot, "_resolve_host_name", hang)
    assert machine_snapshot.PART_WITHIN_S < 2  # a run waits for it
    monkeypatch.setattr(machine_snapshot, "PART_WITHIN_S", 0.5)
    began = time.monotonic()
    seen = collect(root=tmp_path)
    assert time.monotonic() - began < 5
    assert seen.unknown["host_addresses"].endswith(" 0.5 s")
    assert machine_snapshot.PATIENT_WITHIN_S > 5  # for cards that must wake up
    monkeypatch.setattr(machine_snapshot, "read_cards", lambda: time.sleep(1.5) or ())
    write(tmp_path, {"proc/driver/nvidia/gpus/0000:1b:00.0/information": ""})
    assert "cards" not in collect(root=tmp_path).unknown
    assert seen.unknown["shared_memory"].startswith("FileNotFoundError")
    assert seen.host


def test_a_folder_that_cannot_be_written() -> None:
    """A folder of /proc, which refuses root as well."""
    seen = collect(Path("/proc/self/run"))
    assert seen.output is not None
    assert seen.output.error


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("localhost:29500", "on this machine"),
        ("[::1]:29500", "on this machine"),
        ("192.0.2.1:29500", "on another machine (192.0.2.1)"),
    ],
)
def test_where_the_ranks_meet(endpoint: str, place: str) -> None:
    if "::1" in endpoint and "::1" not in collect().interfaces["lo"].addresses:
        pytest.skip("no IPv6 here")
    assert collect(rdzv_endpoint=endpoint).rendezvous == place


def test_a_host_that_is_not_known() -> None:
    assert "rendezvous" in collect(rdzv_endpoint="no-such-host.invalid:29500").unknown


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from surefoot.diagnostics.preflight.runner import examine, snapshot_for; "
        "examine(snapshot_for(None)); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def device(
    root: Path,
    path: str,
    *,
    kind: str = "0x060400",
    vendor: str = "0x8086",
    control: int | None = None,
    size: int = 4096,
) -> None:
    """A PCI device below others. Its first extended capability is another one, the second is access control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x200 << 20).to_bytes(4, "little")
    if control is not None:
        space[0x200:0x204] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x206:0x208] = control.to_bytes(2, "little")
    folder = root / "sys/devices/pci0000:00" / path
    folder.mkdir(parents=True)
    (folder / "class").write_text(kind)
    (folder / "vendor").write_text(vendor)
    (folder / "config").write_bytes(bytes(space[:size]))
    link = root / "sys/bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


GPU = {"kind": "0x030200", "vendor": "0x10de"}


def test_bridges_above_gpus_that_redirect_are_known(tmp_path: Path) -> None:
    assert collect(root=tmp_path).acs == (), "no GPU"
    device(tmp_path, "0000:00:01.0", control=0b11111)
    device(tmp_path, "0000:00:01.0/0000:01:00.0", kind="0x010802")  # a disk
    assert collect(root=tmp_path).acs == (), "what stands above a disk does not matter"
    device(tmp_path, "0000:00:02.0", control=0b00100)
    device(tmp_path, "0000:00:02.0/0000:02:00.0", control=0b00011)
    device(tmp_path, "0000:00:02.0/0000:02:00.0/0000:03:00.0", **GPU)
    device(tmp_path, "0000:00:03.0")
    device(tmp_path, "0000:00:03.0/0000:04:00.0", **GPU)
    assert collect(root=tmp_path).acs == ("0000:00:02.0",)
    (tmp_path / "sys/devices/pci0000:00/0000:00:03.0/config").unlink()
    assert collect(root=tmp_path).acs == ("0000:00:02.0",), "what cannot be read is left out"


def test_who_may_only_read_the_beginning_knows_of_no_bridge(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:02.0", control=0b00100, size=64)
    device(tmp_path, "0000:00:02.0/0000:03:00.0", **GPU)
    assert collect(root=tmp_path).acs is None


def test_a_list_of_capabilities_that_leads_in_a_circle(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:03.0")
    device(tmp_path, "0000:00:03.0/0000:04:00.0", **GPU)
    config = tmp_path / "sys/devices/pci0000:00/0000:00:03.0/config"
    space = bytearray(config.read_bytes())
    space[0x200:0x204] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    config.write_bytes(bytes(space))
    assert collect(root=tmp_path).acs == ()


def test_who_listens_on_the_port_of_the_rendezvous_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        seen = collect(None, f"127.0.0.1:{port}")
        assert seen.rendezvous == f"on this machine, where process {os.getpid()} listens on its port"
    assert collect(None, f"127.0.0.1:{port}").rendezvous == "on this machine"


def test_a_snapshot_of_nested_values_says_what_changed(tmp_path: Path) -> None:
    seen = collect(tmp_path)
    other = replace(seen, interfaces={**seen.interfaces, "lo": replace(seen.interfaces["lo"], mtu=1)}, kernel="1.0")
    assert changes(seen, other) == [
        f"kernel: {seen.kernel} -> 1.0",
        f"interfaces.lo.mtu: {seen.interfaces['lo'].mtu} -> 1",
    ]
