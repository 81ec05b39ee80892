"""What the processes of a run listen on, read from /proc: psutil sees its own network namespace alone."""

import ipaddress
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LISTENING, UNCONNECTED = "0A", "07"
"""States of a TCP socket that accepts connections, and of a UDP socket that takes packets from anyone."""


@dataclass(frozen=True)
class ListeningSocket:
    command: str
    """The module or program of the process, such as `surefoot.launch.rank_process`."""
    protocol: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listening_sockets(process: int) -> set[ListeningSocket]:
    """Return what a process listens on, over TCP and UDP; nothing if it has ended."""
    sockets = set()
    with suppress(OSError):
        inodes = set()
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(descriptor.readlink()))
        if not any(inode.startswith("socket:") for inode in inodes):
            return sockets
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        command = words[words.index("-m") + 1] if "-m" in words else words[0]
        for protocol in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{process}/net/{protocol}").read_text().splitlines()[1:]:
                fields = line.split()
                is_open = fields[3] == (LISTENING if protocol.startswith("tcp") else UNCONNECTED)
                if is_open and f"socket:[{fields[9]}]" in inodes:
                    host, port = fields[1].split(":")
                    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
                    address = str(ipaddress.ip_address(b"".join(words)))
                    sockets.add(ListeningSocket(command, protocol, address, int(port, 16)))
    return sockets


def watch_sockets(*processes: "subprocess.Popen[str]", within_s: float) -> set[ListeningSocket]:
    """Return all that the processes, and those they start, listen on until they have ended.

    Raises: TimeoutError after `within_s`, with the processes killed.
    """
    sockets: set[ListeningSocket] = set()
    deadline = time.monotonic() + within_s
    while any(process.poll() is None for process in processes):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                sockets |= {socket for member in tree for socket in listening_sockets(member.pid)}
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise TimeoutError(f"the processes have not ended after {within_s:.0f} s")
        time.sleep(0.05)
    return sockets
