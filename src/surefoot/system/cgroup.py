"""What the control group of this process allows, and how often the kernel enforced it. Standard library only.

Of version 2 and of version 1; every answer is None where it cannot be read.
"""

from math import inf
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


def oom_kills() -> int | None:
    """Processes that the kernel killed for memory in this group so far."""
    groups = _groups("memory")
    return _values(groups[0], "memory.events", "memory.oom_control").get("oom_kill") if groups else None


def memory_limit_bytes() -> int | None:
    """The most memory this group may use, by its own limit or that of a group around it; None without any."""
    return min((limit for folder in _groups("memory") if (limit := _memory_limit(folder)) is not None), default=None)


def memory_used_bytes() -> int | None:
    """What the group with that limit uses of it now, without the page cache that the kernel would give back."""
    groups = _groups("memory")
    if not groups:
        return None
    folder = min(groups, key=lambda group: limit if (limit := _memory_limit(group)) is not None else UNLIMITED_BYTES)
    used = _text(folder, "memory.current", "memory.usage_in_bytes")
    stat = _values(folder, "memory.stat", "memory.stat")
    cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
    return int(used) - cache if used.isdigit() else None


def cpu_quota() -> float | None:
    """CPUs that the processes of this group may use at the same time, as with memory; None without a limit."""
    return min((quota for folder in _groups("cpu") if (quota := _quota(folder)) is not None), default=None)


def tasks() -> tuple[int, int] | None:
    """(threads of all processes in the group with the lowest limit, that limit); None without a limit."""
    limits = [
        (int(said), folder) for folder in _groups("pids") if (said := _text(folder, "pids.max", "pids.max")).isdigit()
    ]
    if not limits:
        return None
    limit, folder = min(limits)
    used = _text(folder, "pids.current", "pids.current")
    return (int(used), limit) if used.isdigit() else None


def throttled_periods() -> tuple[int, int] | None:
    """(periods in which the group with that limit waited for its share of the CPUs, periods in which it ran) so far."""
    groups = _groups("cpu")
    if not groups:
        return None
    folder = min(groups, key=lambda group: quota if (quota := _quota(group)) is not None else inf)
    found = _values(folder, "cpu.stat", "cpu.stat")
    if "nr_throttled" not in found or "nr_periods" not in found:
        return None
    return found["nr_throttled"], found["nr_periods"]


def _memory_limit(folder: Path) -> int | None:
    found = _text(folder, "memory.max", "memory.limit_in_bytes")
    limit = int(found) if found.isdigit() else None
    return limit if limit is not None and limit < UNLIMITED_BYTES else None


def _quota(folder: Path) -> float | None:
    new = _text(folder, "cpu.max", "cpu.cfs_quota_us").split()
    if len(new) == 2:  # version 2: quota and period
        quota, period = new
    elif new:
        quota, period = new[0], _text(folder, "cpu.max", "cpu.cfs_period_us")
    else:
        return None
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _values(folder: Path, new: str, old: str) -> dict[str, int]:
    """The lines `name number` of a file."""
    pairs = (line.split() for line in _text(folder, new, old).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(folder: Path, new: str, old: str) -> str:
    for name in (new, old):
        try:
            return (folder / name).read_text().strip()
        except OSError:  # of the other version, or not allowed
            continue
    return ""


def control_file(controller: str, new: str, old: str) -> Path | None:
    """A file of this process's group: `new` of version 2, `old` of version 1; None where there is none."""
    files = (folder / name for folder in _groups(controller)[:1] for name in (new, old))
    return next((file for file in files if file.is_file()), None)


def _groups(controller: str) -> list[Path]:
    """The folders of this process's group and of those around it; none where there is no such controller."""
    try:
        groups = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in sorted(groups, key=lambda group: group[1] == ""):  # version 1 holds where there is one
        if controller in controllers.split(","):
            root = MOUNT / controllers
        elif controllers == "":
            root = MOUNT
        else:
            continue
        own = root / path.lstrip("/")
        inside = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
        there = [folder for folder in inside if any(folder.glob(f"{controller}.*"))]
        if there:  # in a container the mount may be the group itself
            return there
    return []
