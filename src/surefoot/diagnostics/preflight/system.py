"""Checks of the limits of the kernel and the container. Pure."""

from surefoot.diagnostics.preflight.check import CheckContext, NotApplicable, Result, fail, ok
from surefoot.diagnostics.preflight.gpus import has_full_nvlink, select_gpus

MIB, GIB = 1 << 20, 1 << 30
WANTED_SHARED_BYTES = 512 * MIB
"""Least free shared memory: Docker's default of 64 MiB is too little for NCCL between GPUs of one machine."""
LEAST_LOCKED_BYTES = 1 * GIB
LEAST_FILES = 1024
LEAST_ADDRESSES_BYTES = 8 * GIB
"""Addresses that a rank on the CPU needs beside its model: torch and transformers map 2.3 GiB before a step."""
THREADS_OF_A_RANK = 256
"""Estimated threads of a rank: autograd, OpenMP, gloo or NCCL, saving, monitoring, and data workers."""
LEAST_INODES = 1000
MUCH_SWAPPED, SHORT_OF_MEMORY = 0.05, 0.1
"""Shares of memory: swap in use above the first with less than the second available is reported."""
SLOW_WRITE_S = 1.0
"""Longest time to write 1 MiB before the file system is reported as slow."""


def check_shared_memory(context: CheckContext) -> Result:
    disk = context.machine.shared_memory
    if disk is None:
        raise NotApplicable(context.machine.unknown.get("shared_memory", "no /dev/shm"))
    summary = f"{disk.free_bytes / MIB:.0f} MiB free in /dev/shm"
    if not context.uses_nccl or context.local_ranks == 1:
        return ok(f"{summary}; only NCCL between GPUs of one machine needs it")
    if disk.free_bytes < WANTED_SHARED_BYTES:
        return fail("SF701", f"{summary}, for {context.local_ranks} ranks", free_bytes=disk.free_bytes)
    return ok(summary)


def _require_limit(context: CheckContext, name: str) -> int:
    """Return a limit of this process; -1 for none. Raises: NotApplicable if it is unknown."""
    limit = context.machine.limits.get(name)
    if limit is None:
        raise NotApplicable(context.machine.unknown.get("limits", "not known"))
    return limit


def check_locked_memory(context: CheckContext) -> Result:
    limit = _require_limit(context, "memlock")
    summary = "no limit" if limit < 0 else f"{limit / MIB:.0f} MiB"
    if not context.machine.ports or not context.uses_nccl or context.nodes == 1:
        return ok(f"{summary}; only InfiniBand and RoCE between machines need it")
    if 0 <= limit < LEAST_LOCKED_BYTES:
        return fail("SF702", f"this process may lock {summary} of memory", memlock_bytes=limit)
    return ok(summary)


def check_open_files(context: CheckContext) -> Result:
    limit = _require_limit(context, "nofile")
    if 0 <= limit < LEAST_FILES:
        return fail("SF703", f"this process may have {limit} files open", nofile=limit)
    return ok(f"{limit if limit >= 0 else 'no limit'}")


def check_processes(context: CheckContext) -> Result:
    limit = _require_limit(context, "nproc")
    if 0 <= limit < THREADS_OF_A_RANK * context.local_ranks:
        return fail("SF729", f"this user may have {limit} threads, for {context.local_ranks} ranks", nproc=limit)
    return ok(f"{limit if limit >= 0 else 'no limit'}")


def check_address_space(context: CheckContext) -> Result:
    limit = context.machine.limits.get("as", -1)
    if limit < 0:
        return ok("no limit")
    needed, why = LEAST_ADDRESSES_BYTES, "Python, libraries and threads alone map several"
    if context.is_on_gpus:
        needed = context.machine.memory_bytes.get("total", LEAST_ADDRESSES_BYTES)
        why = "CUDA reserves addresses for all memory of the machine and its GPUs"
    if limit < needed:
        cause = f"this process may have {limit / GIB:.1f} GiB of addresses (ulimit -v), and {why}"
        return fail("SF745", cause, address_space_bytes=limit, needed_bytes=needed)
    return ok(f"{limit / GIB:.1f} GiB")


def check_processors(context: CheckContext) -> Result:
    cpus = context.machine.cpus
    if not cpus:
        raise NotApplicable(context.machine.unknown.get("cpus", "not known"))
    allowed = min(cpus["usable"], cpus.get("quota", cpus["usable"]))
    threads = context.machine.environment.get("OMP_NUM_THREADS", "")
    each = int(threads) if threads.isdecimal() else 1
    if context.local_ranks > allowed or each * context.local_ranks > 2 * allowed:
        what = f"{context.local_ranks} ranks" + (f" x OMP_NUM_THREADS={threads}" if each > 1 else "")
        cause = f"{what} need {each * context.local_ranks} CPUs, and this process may use {allowed:g}"
        return fail("SF714", cause, usable=allowed)
    if not threads and cpus.get("quota", allowed) < cpus["usable"] / 2 and context.local_ranks == 1:
        cause = (
            f"the container may use {allowed:g} CPUs at a time, but shows {cpus['usable']:g}, and a thread is started "
            "for each of these"
        )
        return fail("SF714", cause, usable=allowed)
    return ok(f"{allowed:g} of {cpus['count']:g} CPUs")


def check_bfloat16(context: CheckContext) -> Result:
    run = context.require_run()
    if run.dtype != "bfloat16" or context.is_on_gpus:
        raise NotApplicable("only bfloat16 on the CPU is looked at")
    if context.machine.multiplies_bfloat16 is None:
        raise NotApplicable(context.machine.unknown.get("multiplies_bfloat16", "not known"))
    if not context.machine.multiplies_bfloat16:
        cause = (
            "dtype: bfloat16, and these processors have no instructions for it: products take up to 28 times as long. "
            f"Set dtype: float32 ({context.where('dtype')})"
        )
        return fail("SF748", cause)
    return ok("the processors have instructions for it")


def check_swap(context: CheckContext) -> Result:
    memory = context.machine.memory_bytes
    if "swap_total" not in memory:
        raise NotApplicable(context.machine.unknown.get("memory_bytes", "not known"))
    used, total = memory.get("swap_used", 0), memory["swap_total"]
    summary = f"{used / GIB:.1f} of {total / GIB:.1f} GiB in use" if total else "none"
    if used > MUCH_SWAPPED * memory["total"] and memory["available"] < SHORT_OF_MEMORY * memory["total"]:
        cause = f"{summary}, and {memory['available'] / GIB:.1f} GiB of memory are free"
        return fail("SF728", cause, swap_used_bytes=used, available_bytes=memory["available"])
    return ok(summary)


def check_iommu(context: CheckContext) -> Result:
    iommu, acs = context.machine.iommu, context.machine.acs
    if not context.uses_nccl or context.machine.gpus < 2:
        raise NotApplicable("only peer-to-peer between GPUs is affected")
    if has_full_nvlink(select_gpus(context)):
        return ok(f"{iommu or 'not known'}; the GPUs are joined by NVLink")
    if iommu.startswith("on") and "=pt" not in iommu:
        return fail(
            "SF708", f"the IOMMU is {iommu}, and {context.machine.gpus} GPUs communicate with each other", iommu=iommu
        )
    if acs:
        bridges = f"{len(acs)} PCI bridges"
        cause = f"{bridges} route traffic between GPUs through the processor (ACS): {', '.join(acs[:4])}"
        return fail("SF708", cause, bridges=list(acs))
    return ok(f"{iommu or 'not known'}; {'ACS cannot be read' if acs is None else 'no bridge redirects (ACS)'}")


def check_storage(context: CheckContext) -> Result:
    disk = context.machine.output
    if disk is None:
        why = "no run is given" if context.run is None else context.machine.unknown.get("output", "not known")
        if "no answer" in why:
            return fail("SF711", f"the file system of output_dir is slow, or does not answer: {why}", error=why)
        raise NotApplicable(why)
    if disk.error:
        cause = f"nothing can be written to {disk.path}: {disk.error}"
        return fail("SF711", cause, is_fatal=True, error=disk.error)
    if 0 <= disk.free_inodes < LEAST_INODES:
        cause = f"only {disk.free_inodes} more files can be created at {disk.path}"
        return fail("SF711", cause, free_inodes=disk.free_inodes)
    if disk.write_s is not None and disk.write_s > SLOW_WRITE_S:
        cause = f"writing one MiB at {disk.path} takes {disk.write_s:.1f} s"
        return fail("SF711", cause, write_s=round(disk.write_s, 2))
    return ok(f"{disk.free_bytes / GIB:.1f} GiB free on {disk.kind or 'a file system'} at {disk.path}")
