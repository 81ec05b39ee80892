"""Checks of versions and environment variables. Pure."""

import difflib
import re

from surefoot.doctor.check import Check, Seen, fine, not_applicable, wrong

LEAST_DRIVER = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""CUDA's major version -> the oldest Linux driver that runs it.
Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, read 2026-11"""
LEAST_KERNEL = (5, 5)
"""Source: huggingface/accelerate#1929, which also warns of older ones."""
BAD_DRIVERS = {"545.23.08": ("peer-to-peer between GPUs hangs", "Lightning-AI/pytorch-lightning#19425")}
"""Versions that are known not to work, as of 2026-11: what happens, and where it was found."""

NCCL = frozenset(
    """
    ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS COLLNET_ENABLE
    COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONF_FILE
    CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT
    DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE ENV_PLUGIN GDRCOPY_ENABLE GIN_ENABLE GIN_TYPE GRAPH_DUMP_FILE GRAPH_FILE
    GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE
    IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA
    IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION IB_RETRY_CNT
    IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IB_USE_INLINE
    IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IPC_USE_ABSTRACT_SOCKET LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL
    LEGACY_CUDA_REGISTER LIBRARY LL128_BUFFSIZE LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER MAX_CTAS
    MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS
    MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY
    NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_OVERHEAD NET_PLUGIN NET_SHARED_BUFFERS
    NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE
    NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD
    P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY
    PARAM_DUMP_ENABLE PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PROTO PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE
    RAS_TIMEOUT_FACTOR RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY
    SHM_USE_CUDA_MEMCPY SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC
    SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SYM_CTAS SYM_KERNEL THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK
    TOPO_FILE TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD WIN_ENABLE WIN_STRIDE
    WORK_ARGS_BYTES WORK_FIFO_BYTES VERSION LIB_DIR ASYNC_ERROR_HANDLING BLOCKING_WAIT DESYNC_DEBUG
    ENABLE_TIMING HOME INCLUDE_DIR ROOT
    """.split()
)
"""Names after NCCL_, by its documentation as of version 2.28; the last ones are of torch and of builds."""
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of one machine copy through host memory",
    "NCCL_SHM_DISABLE": "ranks of one machine talk through the network",
    "NCCL_ALGO": "NCCL may not choose the algorithm that is best for each size",
    "NCCL_PROTO": "NCCL may not choose the protocol that is best for each size",
    "NCCL_NTHREADS": "it limits the threads of each of NCCL's kernels",
    "NCCL_MAX_NCHANNELS": "it limits how much of the links NCCL uses",
    "NCCL_NVLS_ENABLE": "it switches the switches' own sums off, where it is 0",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG": "each collective is checked by another one, where it is DETAIL",
    "NCCL_DEBUG": "every call is written to the log, where it is TRACE",
}
"""Variables for looking for a fault, that make every run slow: what they do."""
SLOW_VALUES = {"NCCL_NVLS_ENABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "TRACE"}
SWITCHES = frozenset(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING"))
"""Of these, what 0 switches off."""


def versions(seen: Seen) -> Check:
    name, found, gpus = "versions", seen.machine.versions, seen.gpus
    said = ", ".join(
        f"{one} {found[one]}" for one in ("torch", "cuda", "nccl", "driver", "transformers") if one in found
    )
    driver, cuda = found.get("driver"), found.get("cuda")
    wants_gpus = gpus > 0 and (seen.run is None or seen.run.device != "cpu")
    if wants_gpus and cuda is None and "torch" in found:
        return wrong(
            name,
            "SF709",
            f"this machine has {gpus} GPUs, and torch {found['torch']} was built without CUDA",
            fix="pip install torch from PyPI or https://download.pytorch.org/whl for your CUDA; or device=cpu.",
            torch=found["torch"],
        )
    if seen.is_on_gpus:
        least = LEAST_DRIVER.get(_numbers(cuda or "0")[0])
        if driver and least and _numbers(driver) < least:
            needed = ".".join(map(str, least))
            return wrong(name, "SF709", f"torch was built for CUDA {cuda}, which needs a driver from {needed} on, and "
                         f"this machine's is {driver}", driver=driver, cuda=cuda, needed=needed)  # fmt: skip
        if driver in BAD_DRIVERS and seen.uses_nccl and seen.machine.environment.get("NCCL_P2P_DISABLE") != "1":
            what, where = BAD_DRIVERS[driver]
            return wrong(name, "SF709", f"with driver {driver} {what} ({where})", driver=driver,
                         fix="Use another driver, or export NCCL_P2P_DISABLE=1.")  # fmt: skip
    if gpus > 1 and seen.uses_nccl and _numbers(seen.machine.kernel) < LEAST_KERNEL:
        return wrong(name, "SF709", f"the kernel is {seen.machine.kernel}; before 5.5 ranks are known to hang in their "
                     "first meeting", kernel=seen.machine.kernel)  # fmt: skip
    return fine(name, said) if said else not_applicable(name, seen.machine.unknown.get("versions", "not known"))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text)[:3]) or (0,)


def library_path(seen: Seen) -> Check:
    """Another NCCL than torch's own is loaded where one stands in the way of it."""
    name, environment = "NCCL that is loaded", seen.machine.environment
    if not seen.uses_nccl:
        return not_applicable(name, "only runs of several GPUs use it")
    preloaded = [one for one in environment.get("LD_PRELOAD", "").split(":") if "nccl" in one]
    if preloaded:
        return wrong(
            name,
            "SF709",
            f"LD_PRELOAD puts {', '.join(preloaded)} before the NCCL that torch came with",
            fix="unset LD_PRELOAD, unless it is meant: then all machines must have the same.",
            LD_PRELOAD=environment["LD_PRELOAD"],
        )
    return fine(name, f"torch's own, {seen.machine.versions.get('nccl', 'version not known')}")


def variables(seen: Seen) -> Check:
    name, environment = "environment variables", seen.machine.environment
    for variable in environment:
        suffix = variable.removeprefix("NCCL_")
        if variable.startswith("NCCL_") and suffix not in NCCL:
            near = difflib.get_close_matches(suffix, NCCL, 1, cutoff=0.85)
            if near:
                return wrong(name, "SF710", f"{variable} is no variable of NCCL, which would ignore it",
                             fix=f"Did you mean NCCL_{near[0]}?", variable=variable)  # fmt: skip
    slow = [one for one in SLOW if one in environment and _is_slow(one, environment[one])]
    if slow and seen.is_on_gpus:
        said = "; ".join(f"{one}={environment[one]}: {SLOW[one]}" for one in slow)
        return wrong(name, "SF710", said, fix=f"unset {' '.join(slow)}, unless a fault is looked for.")
    set_ = [one for one in environment if one.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_"))]
    return fine(name, f"set: {', '.join(set_) if set_ else 'none'}")


def _is_slow(variable: str, value: str) -> bool:
    if variable in SLOW_VALUES:
        return value.upper() == SLOW_VALUES[variable]
    return value not in ("", "0") if variable in SWITCHES else value != ""


CHECKS = (versions, library_path, variables)
