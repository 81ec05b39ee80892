"""What the control group of this process allows, and how often the kernel enforced it. Standard library only.

Of version 2 and of version 1; every answer is None where it cannot be read.
"""

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


def oom_kills() -> int | None:
    """Processes that the kernel killed for memory in this group so far."""
    found = _values("memory", "memory.events", "memory.oom_control")
    return found.get("oom_kill")


def memory_limit_bytes() -> int | None:
    """The most memory this group may use; None also where there is no limit."""
    found = _text("memory", "memory.max", "memory.limit_in_bytes")
    limit = int(found) if found.isdigit() else None
    return limit if limit is not None and limit < UNLIMITED_BYTES else None


def memory_used_bytes() -> int | None:
    """What this group uses of it now, without the page cache that the kernel would give back."""
    used = _text("memory", "memory.current", "memory.usage_in_bytes")
    stat = _values("memory", "memory.stat", "memory.stat")
    cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
    return int(used) - cache if used.isdigit() else None


def cpu_quota() -> float | None:
    """CPUs that the processes of this group may use at the same time; None also where there is no limit."""
    new = _text("cpu", "cpu.max", "cpu.cfs_quota_us").split()
    if len(new) == 2:  # version 2: quota and period
        quota, period = new
    elif new:
        quota, period = new[0], _text("cpu", "cpu.max", "cpu.cfs_period_us")
    else:
        return None
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def throttled_periods() -> tuple[int, int] | None:
    """(periods in which this group had to wait for its share of the CPUs, periods in which it ran) so far."""
    found = _values("cpu", "cpu.stat", "cpu.stat")
    if "nr_throttled" not in found or "nr_periods" not in found:
        return None
    return found["nr_throttled"], found["nr_periods"]


def _values(controller: str, new: str, old: str) -> dict[str, int]:
    """The lines `name number` of a file."""
    pairs = (line.split() for line in _text(controller, new, old).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(controller: str, new: str, old: str) -> str:
    path = control_file(controller, new, old)
    try:
        return path.read_text().strip() if path is not None else ""
    except OSError:
        return ""


def control_file(controller: str, new: str, old: str) -> Path | None:
    """A file of this process's group: `new` of version 2, `old` of version 1; None where there is none."""
    try:
        groups = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in sorted(
        groups, key=lambda group: group[1] == ""
    ):  # a version 1 holds where there is one
        if controller in controllers.split(","):
            folder, name = MOUNT / controllers, old
        elif controllers == "":
            folder, name = MOUNT, new
        else:
            continue
        for inside in (folder / path.lstrip("/"), folder):  # in a container the mount is the group itself
            if (inside / name).is_file():
                return inside / name
    return None
