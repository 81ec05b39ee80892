"""Memory of this machine, under the limits of its cgroup."""

import psutil

from surefoot.system import cgroup


def memory_bytes() -> int:
    """Return the bytes that processes here may use together: the cgroup's limit, or the machine's memory."""
    limit, total = cgroup.memory_limit_bytes(), psutil.virtual_memory().total
    return min(limit, total) if limit is not None else int(total)


def room_bytes() -> int:
    """Return the bytes that are still free for programs, without swap, under the machine's and the cgroup's limits."""
    free = int(psutil.virtual_memory().available)
    limit, used = cgroup.memory_limit_bytes(), cgroup.memory_used_bytes()
    return free if limit is None or used is None else min(free, max(0, limit - used))
