"""What the kernel says of GPUs and of processes that it killed."""

import os
import time
from pathlib import Path

import pytest

from surefoot.diagnostics.rules.accelerators import XIDS, find_gpu_errors
from surefoot.findings import CATALOGUE
from surefoot.system.kernel_log import LOG, KernelLog, gpu_errors, killed_for_memory, recent_messages, troubles

FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:86:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault"
KILLED = "Out of memory: Killed process 4711 (python) total-vm:9000000kB, anon-rss:8000000kB"
KILLED_IN_CGROUP = "Memory cgroup out of memory: Killed process 4712 (python) total-vm:9kB"


def written(path: Path, *lines: str) -> Path:
    path.write_text(
        "".join(f"4,{number},{time.monotonic_ns() // 1000},-;{line}\n" for number, line in enumerate(lines))
    )
    return path


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "kmsg", FAULT)
    log = KernelLog(path)
    assert log.read() == []
    with open(path, "a") as file:
        file.write(f"3,9,99,-;{FALLEN}\n SUBSYSTEM=pci\n")
    assert log.read() == [FALLEN]
    assert log.read() == []
    log.end()


def test_an_xid_is_named_with_what_it_means() -> None:
    device, ours = find_gpu_errors(gpu_errors([FALLEN, FAULT, "usb 1-1: new device"]), [4711])
    assert device.code == ours.code == "SF112"
    assert (device.evidence["device"], device.evidence["xid"], ours.evidence["xid"]) == ("0000:3b:00", 79, 31)
    assert f"Xid 79, {XIDS[79]}" in device.cause
    assert "Xid 31" in ours.cause
    assert device.fix == CATALOGUE["SF112"].fix != ours.fix


def test_each_error_of_a_card_is_named_once() -> None:
    later = FALLEN.replace("79", "45")
    found = find_gpu_errors(gpu_errors([FALLEN, later, later, FALLEN.replace("79", "48")]), [])
    assert [finding.evidence["xid"] for finding in found] == [79, 48]


def test_errors_that_other_programs_cause_are_not_ours() -> None:
    assert find_gpu_errors(gpu_errors([FAULT]), [4712]) == []


def test_processes_that_were_killed_for_memory(tmp_path: Path) -> None:
    assert killed_for_memory(recent_messages(written(tmp_path / "kmsg", FAULT, KILLED, KILLED_IN_CGROUP))) == {4711}
    old = tmp_path / "old"
    old.write_text(f"4,1,{time.monotonic_ns() // 1000 - 10**9},-;{KILLED}\n")
    assert recent_messages(old) == [], "a thousand seconds ago it was another process"
    assert recent_messages(tmp_path / "none") == []
    assert "No such file" in KernelLog(tmp_path / "none").why_not


def test_troubles_of_the_machine_and_of_the_run() -> None:
    crash = "python3[4711]: segfault at 8 ip 00007f in libcuda.so.580[7f00+1000] likely on CPU 3"
    trap = "traps: python3[4711] general protection fault ip:7f sp:7f error:0 in libtorch_cpu.so"
    other = crash.replace("4711", "4712")
    machine = [
        "mce: [Hardware Error]: Machine check events logged",
        "blk_update_request: I/O error, dev nvme0n1, sector 12",
        "nfs: server storage1 not responding, still trying",
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
    ]
    ordinary = ["EDAC MC0: Giving out device", "nfs: server storage1 OK", "usb 1-1: new device", FAULT]
    assert troubles([crash, trap, other, *machine, *ordinary], {4711}) == [crash, trap, *machine]


@pytest.mark.skipif(not os.access(LOG, os.R_OK), reason="the kernel's log may not be read here")
def test_the_kernels_own_log_is_read_to_its_end() -> None:
    log = KernelLog(from_the_start=True)
    if log.why_not:
        pytest.skip(log.why_not)
    assert log.read()
    assert len(log.read()) < 50, "the rest would have come with the first look"
    log.end()
