"""Checks of what the kernel and the container allow. Pure."""

from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.diagnostics.preflight.gpus import joins_all, used

MIB, GIB = 1 << 20, 1 << 30
WANTED_SHARED_BYTES = 512 * MIB
"""Docker's default of 64 MiB is too little for NCCL between the GPUs of one machine."""
LEAST_LOCKED_BYTES = 1 * GIB
LEAST_FILES = 1024
THREADS_OF_A_RANK = 256
"""A judgement: autograd, OpenMP, gloo or NCCL, saving, watching, and workers that prepare data."""
LEAST_INODES = 1000
MUCH_SWAPPED, SHORT_OF_MEMORY = 0.05, 0.1
"""Shares of memory."""
SLOW_WRITE_S = 1.0
"""For a mebibyte."""


def shared_memory(seen: CheckContext) -> Check:
    name, disk = "shared memory", seen.machine.shared_memory
    if disk is None:
        return not_applicable(name, seen.machine.unknown.get("shared_memory", "no /dev/shm"))
    said = f"{disk.free_bytes / MIB:.0f} MiB free in /dev/shm"
    if not seen.uses_nccl or seen.local_ranks == 1:
        return ok(name, f"{said}; only NCCL between GPUs of one machine needs it")
    if disk.free_bytes < WANTED_SHARED_BYTES:
        return fail(name, "SF701", f"{said}, for {seen.local_ranks} ranks", free_bytes=disk.free_bytes)
    return ok(name, said)


def locked_memory(seen: CheckContext) -> Check:
    name, limit = "locked memory", seen.machine.limits.get("memlock")
    if limit is None:
        return not_applicable(name, seen.machine.unknown.get("limits", "not known"))
    said = "no limit" if limit < 0 else f"{limit / MIB:.0f} MiB"
    if not seen.machine.ports or not seen.uses_nccl or seen.nodes == 1:
        return ok(name, f"{said}; only InfiniBand and RoCE between machines need it")
    if 0 <= limit < LEAST_LOCKED_BYTES:
        return fail(name, "SF702", f"this process may lock {said} of memory", memlock_bytes=limit)
    return ok(name, said)


def open_files(seen: CheckContext) -> Check:
    name, limit = "open files", seen.machine.limits.get("nofile")
    if limit is None:
        return not_applicable(name, seen.machine.unknown.get("limits", "not known"))
    if 0 <= limit < LEAST_FILES:
        return fail(name, "SF703", f"this process may have {limit} files open", nofile=limit)
    return ok(name, f"{limit if limit >= 0 else 'no limit'}")


def processes(seen: CheckContext) -> Check:
    name, limit = "processes and threads", seen.machine.limits.get("nproc")
    if limit is None:
        return not_applicable(name, seen.machine.unknown.get("limits", "not known"))
    if 0 <= limit < THREADS_OF_A_RANK * seen.local_ranks:
        return fail(name, "SF729", f"this user may have {limit} threads, for {seen.local_ranks} ranks", nproc=limit)
    return ok(name, f"{limit if limit >= 0 else 'no limit'}")


def processors(seen: CheckContext) -> Check:
    name, cpus = "processors", seen.machine.cpus
    if not cpus:
        return not_applicable(name, seen.machine.unknown.get("cpus", "not known"))
    allowed = min(cpus["usable"], cpus.get("quota", cpus["usable"]))
    said = f"{allowed:g} of {cpus['count']:g} CPUs"
    threads = seen.machine.environment.get("OMP_NUM_THREADS", "")
    each = int(threads) if threads.isdecimal() else 1
    if seen.local_ranks > allowed or each * seen.local_ranks > 2 * allowed:
        what = f"{seen.local_ranks} ranks" + (f" x OMP_NUM_THREADS={threads}" if each > 1 else "")
        cause = f"{what} want {each * seen.local_ranks} CPUs, and this process may use {allowed:g}"
        return fail(name, "SF714", cause, usable=allowed)
    if not threads and cpus.get("quota", allowed) < cpus["usable"] / 2 and seen.local_ranks == 1:
        return fail(
            name,
            "SF714",
            f"the container may use {allowed:g} CPUs at a time, but shows {cpus['usable']:g}, and a thread is started "
            "for each of these",
            usable=allowed,
        )
    return ok(name, said)


def swap(seen: CheckContext) -> Check:
    name, memory = "swap", seen.machine.memory_bytes
    if "swap_total" not in memory:
        return not_applicable(name, seen.machine.unknown.get("memory_bytes", "not known"))
    used, total = memory.get("swap_used", 0), memory["swap_total"]
    said = f"{used / GIB:.1f} of {total / GIB:.1f} GiB in use" if total else "none"
    if used > MUCH_SWAPPED * memory["total"] and memory["available"] < SHORT_OF_MEMORY * memory["total"]:
        return fail(name, "SF728", f"{said}, and {memory['available'] / GIB:.1f} GiB of memory are free",
                     swap_used_bytes=used, available_bytes=memory["available"])  # fmt: skip
    return ok(name, said)


def io_memory_mapping(seen: CheckContext) -> Check:
    name, said = "IOMMU", seen.machine.iommu
    if not seen.uses_nccl or seen.machine.gpus < 2:
        return not_applicable(name, "only peer-to-peer between GPUs is affected")
    if joins_all(used(seen)):
        return ok(name, f"{said or 'not known'}; the GPUs are joined by NVLink")
    if said.startswith("on") and "=pt" not in said:
        return fail(name, "SF708", f"the IOMMU is {said}, and {seen.machine.gpus} GPUs talk to each other", iommu=said)
    acs = seen.machine.acs
    if acs:
        cause = (
            f"{len(acs)} PCI bridges send what GPUs tell each other through the processor (ACS): {', '.join(acs[:4])}"
        )
        return fail(name, "SF708", cause, bridges=list(acs))
    return ok(name, f"{said or 'not known'}; {'ACS cannot be read' if acs is None else 'no bridge redirects (ACS)'}")


def storage(seen: CheckContext) -> Check:
    name, disk = "output_dir", seen.machine.output
    if disk is None:
        why = "no run is given" if seen.run is None else seen.machine.unknown.get("output", "not known")
        if "no answer" in why:
            return fail(name, "SF711", f"the file system of output_dir is slow, or does not answer: {why}", error=why)
        return not_applicable(name, why)
    said = f"{disk.free_bytes / GIB:.1f} GiB free on {disk.kind or 'a file system'} at {disk.path}"
    if disk.error:
        return fail(
            name, "SF711", f"nothing can be written to {disk.path}: {disk.error}", is_fatal=True, error=disk.error
        )
    if 0 <= disk.free_inodes < LEAST_INODES:
        return fail(name, "SF711", f"{disk.free_inodes} files may still be made at {disk.path}",
                     free_inodes=disk.free_inodes)  # fmt: skip
    if disk.write_s is not None and disk.write_s > SLOW_WRITE_S:
        return fail(
            name,
            "SF711",
            f"a mebibyte takes {disk.write_s:.1f} s to be written at {disk.path}",
            write_s=round(disk.write_s, 2),
        )
    return ok(name, said)


CHECKS = (shared_memory, locked_memory, open_files, processes, processors, swap, io_memory_mapping, storage)
