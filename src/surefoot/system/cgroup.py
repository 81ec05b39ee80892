"""Limits of this process's control group, and how often the kernel enforced them. Standard library only.

Both cgroup v2 and v1 are read. Every function returns None for a value that cannot be read.
"""

from collections.abc import Callable
from math import inf
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
GROUPS = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


def oom_kills() -> int | None:
    """Return the number of processes of this group that the kernel has killed for memory so far."""
    groups = _list_cgroup_folders("memory")
    return _read_counters(groups[0], "memory.events", "memory.oom_control").get("oom_kill") if groups else None


def memory_limit_bytes() -> int | None:
    """Return the lowest memory limit of this group and its parent groups; None without a limit."""
    limit_bytes, _ = _find_lowest_limit("memory", _read_memory_limit_bytes)
    return int(limit_bytes) if limit_bytes < inf else None


def memory_used_bytes() -> int | None:
    """Return the memory in use in the group with the lowest limit, without the page cache that can be reclaimed."""
    _, folder = _find_lowest_limit("memory", _read_memory_limit_bytes)
    if folder is None:
        return None
    used = _read_control_file(folder, "memory.current", "memory.usage_in_bytes")
    stat = _read_counters(folder, "memory.stat", "memory.stat")
    cache = stat.get("inactive_file", stat.get("total_inactive_file", 0))
    return int(used) - cache if used.isdigit() else None


def cpu_quota() -> float | None:
    """Return the CPUs that this group may use at once: the lowest limit, as for memory; None without a limit."""
    quota, _ = _find_lowest_limit("cpu", _read_cpu_quota)
    return quota if quota < inf else None


def tasks() -> tuple[int, int] | None:
    """Return (number of threads in the group with the lowest limit, that limit); None without a limit."""
    limits = [
        (int(text), folder)
        for folder in _list_cgroup_folders("pids")
        if (text := _read_control_file(folder, "pids.max", "pids.max")).isdigit()
    ]
    if not limits:
        return None
    limit, folder = min(limits)
    used = _read_control_file(folder, "pids.current", "pids.current")
    return (int(used), limit) if used.isdigit() else None


def throttled_periods() -> tuple[int, int] | None:
    """Return (periods in which the group with the lowest CPU limit was throttled, periods in which it ran) so far."""
    _, folder = _find_lowest_limit("cpu", _read_cpu_quota)
    if folder is None:
        return None
    counters = _read_counters(folder, "cpu.stat", "cpu.stat")
    if "nr_throttled" not in counters or "nr_periods" not in counters:
        return None
    return counters["nr_throttled"], counters["nr_periods"]


def _find_lowest_limit(controller: str, read_limit: Callable[[Path], float]) -> tuple[float, Path | None]:
    """Return the lowest limit of this group and its parent groups, and the folder of the group that has it.

    Without a limit it is infinity, of this process's own group; the folder is None without such a controller.
    """
    limits = [(read_limit(folder), folder) for folder in _list_cgroup_folders(controller)]
    return min(limits, key=lambda limit: limit[0], default=(inf, None))


def _read_memory_limit_bytes(folder: Path) -> float:
    text = _read_control_file(folder, "memory.max", "memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else inf


def _read_cpu_quota(folder: Path) -> float:
    fields = _read_control_file(folder, "cpu.max", "cpu.cfs_quota_us").split()
    if len(fields) == 2:  # cgroup v2: quota and period
        quota, period = fields
    elif fields:
        quota, period = fields[0], _read_control_file(folder, "cpu.max", "cpu.cfs_period_us")
    else:
        return inf
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else inf


def _read_counters(folder: Path, v2_name: str, v1_name: str) -> dict[str, int]:
    """Return the lines `name number` of a control file as name -> number."""
    pairs = (line.split() for line in _read_control_file(folder, v2_name, v1_name).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_control_file(folder: Path, v2_name: str, v1_name: str) -> str:
    for name in (v2_name, v1_name):
        try:
            return (folder / name).read_text().strip()
        except OSError:  # the file belongs to the other cgroup version, or access is denied
            continue
    return ""


def control_file(controller: str, v2_name: str, v1_name: str) -> Path | None:
    """Return a file of this process's group: `v2_name` in cgroup v2, `v1_name` in v1; None if neither exists."""
    files = (folder / name for folder in _list_cgroup_folders(controller)[:1] for name in (v2_name, v1_name))
    return next((file for file in files if file.is_file()), None)


def _list_cgroup_folders(controller: str) -> list[Path]:
    """List the folders of this process's group and its parent groups; empty without such a controller."""
    try:
        groups = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in sorted(groups, key=lambda group: group[1] == ""):  # a v1 hierarchy takes precedence
        if controller in controllers.split(","):
            root = MOUNT / controllers
        elif controllers == "":
            root = MOUNT
        else:
            continue
        own = root / path.lstrip("/")
        inside = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
        with_controller = [folder for folder in inside if any(folder.glob(f"{controller}.*"))]
        if with_controller:  # the mount itself may be the group in a container
            return with_controller
    return []
