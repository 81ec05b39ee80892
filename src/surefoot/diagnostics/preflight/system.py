"""Checks of the limits of the kernel and the container. Pure."""

from surefoot.diagnostics.preflight.check import Check, CheckContext, fail, not_applicable, ok
from surefoot.diagnostics.preflight.gpus import has_full_nvlink, select_gpus

MIB, GIB = 1 << 20, 1 << 30
WANTED_SHARED_BYTES = 512 * MIB
"""Least free shared memory: Docker's default of 64 MiB is too little for NCCL between GPUs of one machine."""
LEAST_LOCKED_BYTES = 1 * GIB
LEAST_FILES = 1024
THREADS_OF_A_RANK = 256
"""Estimated threads of a rank: autograd, OpenMP, gloo or NCCL, saving, monitoring, and data workers."""
LEAST_INODES = 1000
MUCH_SWAPPED, SHORT_OF_MEMORY = 0.05, 0.1
"""Shares of memory: swap in use above the first with less than the second available is reported."""
SLOW_WRITE_S = 1.0
"""Longest time to write 1 MiB before the file system is reported as slow."""


def shared_memory(context: CheckContext) -> Check:
    name, disk = "shared memory", context.machine.shared_memory
    if disk is None:
        return not_applicable(name, context.machine.unknown.get("shared_memory", "no /dev/shm"))
    summary = f"{disk.free_bytes / MIB:.0f} MiB free in /dev/shm"
    if not context.uses_nccl or context.local_ranks == 1:
        return ok(name, f"{summary}; only NCCL between GPUs of one machine needs it")
    if disk.free_bytes < WANTED_SHARED_BYTES:
        return fail(name, "SF701", f"{summary}, for {context.local_ranks} ranks", free_bytes=disk.free_bytes)
    return ok(name, summary)


def locked_memory(context: CheckContext) -> Check:
    name, limit = "locked memory", context.machine.limits.get("memlock")
    if limit is None:
        return not_applicable(name, context.machine.unknown.get("limits", "not known"))
    summary = "no limit" if limit < 0 else f"{limit / MIB:.0f} MiB"
    if not context.machine.ports or not context.uses_nccl or context.nodes == 1:
        return ok(name, f"{summary}; only InfiniBand and RoCE between machines need it")
    if 0 <= limit < LEAST_LOCKED_BYTES:
        return fail(name, "SF702", f"this process may lock {summary} of memory", memlock_bytes=limit)
    return ok(name, summary)


def open_files(context: CheckContext) -> Check:
    name, limit = "open files", context.machine.limits.get("nofile")
    if limit is None:
        return not_applicable(name, context.machine.unknown.get("limits", "not known"))
    if 0 <= limit < LEAST_FILES:
        return fail(name, "SF703", f"this process may have {limit} files open", nofile=limit)
    return ok(name, f"{limit if limit >= 0 else 'no limit'}")


def processes(context: CheckContext) -> Check:
    name, limit = "processes and threads", context.machine.limits.get("nproc")
    if limit is None:
        return not_applicable(name, context.machine.unknown.get("limits", "not known"))
    if 0 <= limit < THREADS_OF_A_RANK * context.local_ranks:
        return fail(name, "SF729", f"this user may have {limit} threads, for {context.local_ranks} ranks", nproc=limit)
    return ok(name, f"{limit if limit >= 0 else 'no limit'}")


def processors(context: CheckContext) -> Check:
    name, cpus = "processors", context.machine.cpus
    if not cpus:
        return not_applicable(name, context.machine.unknown.get("cpus", "not known"))
    allowed = min(cpus["usable"], cpus.get("quota", cpus["usable"]))
    summary = f"{allowed:g} of {cpus['count']:g} CPUs"
    threads = context.machine.environment.get("OMP_NUM_THREADS", "")
    each = int(threads) if threads.isdecimal() else 1
    if context.local_ranks > allowed or each * context.local_ranks > 2 * allowed:
        what = f"{context.local_ranks} ranks" + (f" x OMP_NUM_THREADS={threads}" if each > 1 else "")
        cause = f"{what} want {each * context.local_ranks} CPUs, and this process may use {allowed:g}"
        return fail(name, "SF714", cause, usable=allowed)
    if not threads and cpus.get("quota", allowed) < cpus["usable"] / 2 and context.local_ranks == 1:
        return fail(
            name,
            "SF714",
            f"the container may use {allowed:g} CPUs at a time, but shows {cpus['usable']:g}, and a thread is started "
            "for each of these",
            usable=allowed,
        )
    return ok(name, summary)


def swap(context: CheckContext) -> Check:
    name, memory = "swap", context.machine.memory_bytes
    if "swap_total" not in memory:
        return not_applicable(name, context.machine.unknown.get("memory_bytes", "not known"))
    used, total = memory.get("swap_used", 0), memory["swap_total"]
    summary = f"{used / GIB:.1f} of {total / GIB:.1f} GiB in use" if total else "none"
    if used > MUCH_SWAPPED * memory["total"] and memory["available"] < SHORT_OF_MEMORY * memory["total"]:
        return fail(name, "SF728", f"{summary}, and {memory['available'] / GIB:.1f} GiB of memory are free",
                     swap_used_bytes=used, available_bytes=memory["available"])  # fmt: skip
    return ok(name, summary)


def io_memory_mapping(context: CheckContext) -> Check:
    name, iommu = "IOMMU", context.machine.iommu
    if not context.uses_nccl or context.machine.gpus < 2:
        return not_applicable(name, "only peer-to-peer between GPUs is affected")
    if has_full_nvlink(select_gpus(context)):
        return ok(name, f"{iommu or 'not known'}; the GPUs are joined by NVLink")
    if iommu.startswith("on") and "=pt" not in iommu:
        return fail(
            name, "SF708", f"the IOMMU is {iommu}, and {context.machine.gpus} GPUs talk to each other", iommu=iommu
        )
    acs = context.machine.acs
    if acs:
        cause = (
            f"{len(acs)} PCI bridges send what GPUs tell each other through the processor (ACS): {', '.join(acs[:4])}"
        )
        return fail(name, "SF708", cause, bridges=list(acs))
    return ok(name, f"{iommu or 'not known'}; {'ACS cannot be read' if acs is None else 'no bridge redirects (ACS)'}")


def storage(context: CheckContext) -> Check:
    name, disk = "output_dir", context.machine.output
    if disk is None:
        why = "no run is given" if context.run is None else context.machine.unknown.get("output", "not known")
        if "no answer" in why:
            return fail(name, "SF711", f"the file system of output_dir is slow, or does not answer: {why}", error=why)
        return not_applicable(name, why)
    summary = f"{disk.free_bytes / GIB:.1f} GiB free on {disk.kind or 'a file system'} at {disk.path}"
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
    return ok(name, summary)


CHECKS = (shared_memory, locked_memory, open_files, processes, processors, swap, io_memory_mapping, storage)
