"""Checks of the environment variables that NCCL, gloo, torch, CUDA and OpenMP read. Pure."""

import difflib
import re
from collections.abc import Iterator, Mapping

from surefoot.diagnostics.preflight.check import CheckContext, Result, fail, ok, run_check
from surefoot.diagnostics.preflight.gpus import check_peers
from surefoot.diagnostics.preflight.known_issues import is_workaround
from surefoot.diagnostics.preflight.system import check_iommu

_NAMES_BY_PREFIX = {
    "NCCL_": """
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
    """,
    "GLOO_": "SOCKET_IFNAME DEVICE_TRANSPORT SOCKET_FAMILY",
    "CUDA_": """
    AUTO_BOOST CACHE_DISABLE CACHE_MAXSIZE CACHE_PATH COREDUMP_FILE COREDUMP_GENERATION_FLAGS DEVICE_MAX_CONNECTIONS
    DEVICE_MAX_COPY_CONNECTIONS DEVICE_ORDER DEVICE_WAITS_ON_EXCEPTION DISABLE_JIT DISABLE_PTX_JIT
    ENABLE_COREDUMP_ON_EXCEPTION ENABLE_CPU_COREDUMP_ON_EXCEPTION ENABLE_LIGHTWEIGHT_COREDUMP
    ENABLE_USER_TRIGGERED_COREDUMP FORCE_CDP1_IF_SUPPORTED FORCE_JIT FORCE_PRELOAD_LIBRARIES FORCE_PTX_JIT
    GRAPHS_USE_NODE_PRIORITY HOME INJECTION64_PATH LAUNCH_BLOCKING LIB_PATH LOG_FILE MANAGED_FORCE_DEVICE_ALLOC
    MODULE_DATA_LOADING MODULE_LOADING MPS_ACTIVE_THREAD_PERCENTAGE MPS_CLIENT_PRIORITY MPS_LOG_DIRECTORY
    MPS_PINNED_DEVICE_MEM_LIMIT MPS_PIPE_DIRECTORY PATH ROOT SCALE_LAUNCH_QUEUES TOOLKIT_ROOT_DIR VERSION
    VISIBLE_DEVICES
    """,
    "OMP_": """
    AFFINITY_FORMAT ALLOCATOR CANCELLATION DEBUG DEFAULT_DEVICE DISPLAY_AFFINITY DISPLAY_ENV DYNAMIC MAX_ACTIVE_LEVELS
    MAX_TASK_PRIORITY NESTED NUM_TEAMS NUM_THREADS PLACES PROC_BIND SCHEDULE STACKSIZE TARGET_OFFLOAD
    TEAMS_THREAD_LIMIT THREAD_LIMIT TOOL TOOL_LIBRARIES TOOL_VERBOSE_INIT WAIT_POLICY
    """,
    "TORCH_NCCL_": """
    ABORT_IN_DESTROY_PG ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE
    DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING
    EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK
    NONBLOCKING_TIMEOUT PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
    TRACE_BUFFER_SIZE TRACE_CPP_STACK USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK
    WAIT_TIMEOUT_DUMP_MILSEC
    """,
    "PYTORCH_": """
    ALLOC_CONF CUDA_ALLOC_CONF DEBUG_MPS_ALLOCATOR ENABLE_MPS_FALLBACK HIP_ALLOC_CONF JIT KERNEL_CACHE_PATH
    NO_CUDA_MEMORY_CACHING NVML_BASED_CUDA_CHECK USE_NVFUSER VERSION
    """,
    "TORCH_": """
    CPP_LOG_LEVEL CUDA_ARCH_LIST DISTRIBUTED_DEBUG FR_BUFFER_SIZE FR_DUMP_TEMP_FILE HOME LOGS LOGS_FORMAT LOGS_OUT
    SHOW_CPP_STACKTRACES SHOW_DISPATCH_TRACE TRACE
    """,
}
"""Prefix -> the names after it, from the documentation of NCCL 2.28, CUDA 13, OpenMP 6.0 and torch 2.13, read 2026-11.
The last names of NCCL are read by torch and builds."""
NAMES_BY_PREFIX = {prefix: frozenset(names.split()) for prefix, names in _NAMES_BY_PREFIX.items()}
READERS = {"NCCL_": "NCCL", "GLOO_": "gloo", "CUDA_": "CUDA", "OMP_": "OpenMP"}
"""Prefix -> the library that reads its variables; torch reads the others."""
COMMON_MISTAKES = {
    **{f"{prefix}{name}": f"Did you mean {prefix}SOCKET_IFNAME?" for prefix in ("NCCL_", "GLOO_")
       for name in ("IFNAME", "SOCKET_INTERFACE", "INTERFACE")},
    **dict.fromkeys(
        ("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "NCCL_TIMEOUT_MS"),
        "No variable says how long collectives are waited for: the process group does. Here a rank that stalls is "
        "named within seconds (`on_stall`).",
    ),
}  # fmt: skip
"""Names that people set and no library reads -> what to do."""
MIN_SIMILARITY = 0.85
"""Least similarity to a documented name at which another name is reported: vendors have names of their own."""
STRICT_PREFIXES = frozenset(("NCCL_", "GLOO_", "OMP_", "TORCH_NCCL_"))
"""Prefixes under which a part of a documented name is reported too. Under CUDA_ and TORCH_ scripts keep variables of
their own."""
BUILD_NAME = re.compile("(DIR|HOME|INCLUDE|LIB|PATH|ROOT|VERSION)$")
"""Endings of names that build scripts use under any prefix."""
MAX_SUGGESTIONS = 3
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of one machine copy through host memory",
    "NCCL_SHM_DISABLE": "ranks of one machine talk through the network",
    "NCCL_ALGO": "NCCL may not choose the algorithm that is best for each size",
    "NCCL_PROTO": "NCCL may not choose the protocol that is best for each size",
    "NCCL_NTHREADS": "it limits the threads of each of NCCL's kernels",
    "NCCL_MAX_NCHANNELS": "it limits how much of the links NCCL uses",
    "NCCL_NVLS_ENABLE": "it switches the switches' own sums off, where it is 0",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is asked of the driver",
    "TORCH_DISTRIBUTED_DEBUG": "each collective is checked by another one, where it is DETAIL",
    "NCCL_DEBUG": "every call is written to the log, where it is TRACE",
    "NCCL_P2P_LEVEL": "GPUs of one machine copy through host memory, where it is LOC",
    "NCCL_NET_GDR_LEVEL": "network cards copy through host memory, where it is LOC",
    "NCCL_NET": "ranks of several machines talk over TCP, where it is Socket",
}
"""Debugging variables that make every run slow -> what they do."""
SLOW_VALUES = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "TRACE", "NCCL_P2P_LEVEL": "LOC",
    "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_NET": "SOCKET",
}  # fmt: skip
"""Variables that are slow with one value alone, in capitals."""
NOT_EMPTY = (
    "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_ALGO", "NCCL_PROTO",
    "OMP_NUM_THREADS",
)  # fmt: skip
"""Variables that are empty by mistake: a script set them to a variable of its own that has no value."""
SWITCHES = frozenset(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"))
"""Slow variables that 0 switches off."""

_BOOLEAN_OPTIONS = """
expandable_segments graph_capture_record_stream_reuse pinned_use_background_threads pinned_use_cuda_host_register
release_lock_on_cudamalloc throw_on_cudamalloc_oom
""".split()
_SIZE_OPTIONS = """
max_non_split_rounding_mb max_split_size_mb pinned_max_cached_size_mb pinned_max_round_threshold_mb
pinned_num_register_threads pinned_reserve_segment_size_mb
roundup_bypass_threshold_mb
""".split()
_FRACTION = r"(0?\.\d*[1-9]\d*|[1-9]\d*e-\d+)"
"""Pattern of a number between 0 and 1, both excluded."""
_OTHER_OPTIONS = "backend roundup_power2_divisions".split()
_OPTION = (
    rf"({'|'.join(_BOOLEAN_OPTIONS)}):(True|False)|({'|'.join(_SIZE_OPTIONS)}):\d+"
    rf"|garbage_collection_threshold:{_FRACTION}|per_process_memory_fraction:({_FRACTION}|1(\.0*)?)"
    rf"|({'|'.join(_OTHER_OPTIONS)}):(\[[^\]]*\]|[^,]+)"
)
ALLOCATOR = rf"((^|,)({_OPTION}))*,?"
"""Options of torch's CUDA allocator. Source: torch/csrc/cuda/CUDAAllocatorConfig, 2.13, read 2026-11."""
VALUES: Mapping[str, tuple[str, str]] = {
    "OMP_NUM_THREADS": (r"\d*[1-9]\d*(,\d*[1-9]\d*)*", "a number from 1 on"),
    "NCCL_IB_TIMEOUT": (r"[1-9]|[12]\d|3[01]", "1 to 31: 4.096 us times 2 to that power"),
    "NCCL_IB_GID_INDEX": (r"-?\d+", "a number"),
    "NCCL_BUFFSIZE": (r"\d+", "a number of bytes"),
    "NCCL_P2P_LEVEL": (r"(?i)LOC|NVL|PIX|PXB|PHB|SYS|\d", "LOC, NVL, PIX, PXB, PHB or SYS"),
    "NCCL_NET_GDR_LEVEL": (r"(?i)LOC|PIX|PXB|PHB|SYS|\d", "LOC, PIX, PXB, PHB or SYS"),
    "NCCL_DEBUG": (r"(?i)NONE|VERSION|WARN|INFO|ABORT|TRACE", "VERSION, WARN, INFO or TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": (r"(?i)OFF|INFO|DETAIL", "OFF, INFO or DETAIL"),
    "PYTORCH_CUDA_ALLOC_CONF": (ALLOCATOR, "a list of the allocator's options, such as expandable_segments:True"),
    "PYTORCH_ALLOC_CONF": (ALLOCATOR, "a list of the allocator's options, such as expandable_segments:True"),
    "CUDA_DEVICE_ORDER": (r"PCI_BUS_ID|FASTEST_FIRST", "PCI_BUS_ID or FASTEST_FIRST"),
}
"""Variable -> (pattern of its valid values, the same in words). Other values are ignored or misread."""


def check_variables(context: CheckContext) -> Result:
    """Check for names that no library reads, invalid values, and variables that make every run slow."""
    environment = context.machine.environment
    problems = [*_find_misspelled_names(environment), *_find_invalid_values(environment), *_find_empty(environment)]
    slow = [
        variable
        for variable in SLOW
        if variable in environment and _is_slow(variable, environment[variable]) and not _is_needed(variable, context)
    ]
    if slow and context.is_on_gpus:
        summary = "; ".join(f"{variable}={environment[variable]}: {SLOW[variable]}" for variable in slow)
        problems.append((summary, f"unset {' '.join(slow)}, unless a fault is looked for."))
    if problems:
        return fail("SF710", "; ".join(cause for cause, _ in problems), fix=" ".join(fix for _, fix in problems))
    set_variables = [
        variable for variable in environment if variable.startswith(("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_"))
    ]
    unknown = [
        variable
        for variable in set_variables
        if (prefix := _find_prefix(variable)) and variable.removeprefix(prefix) not in NAMES_BY_PREFIX[prefix]
    ]
    summary = f"; not known here: {', '.join(unknown)}" if unknown else ""
    return ok(f"set: {', '.join(set_variables) if set_variables else 'none'}{summary}")


def _is_needed(variable: str, context: CheckContext) -> bool:
    """Return whether this machine needs a variable that makes other machines slow."""
    if is_workaround(context, variable):
        return True
    checks = [run_check("IOMMU", check_iommu, context), run_check("GPU to GPU", check_peers, context)]
    return variable == "NCCL_P2P_DISABLE" and any(check.finding is not None for check in checks)


def _find_prefix(variable: str) -> str | None:
    return max((prefix for prefix in NAMES_BY_PREFIX if variable.startswith(prefix)), key=len, default=None)


def _find_misspelled_names(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (cause, fix) for names that are close to the name of a variable."""
    for variable in environment:
        prefix = _find_prefix(variable)
        if prefix is None:
            continue
        names, reader = NAMES_BY_PREFIX[prefix], READERS.get(prefix, "torch")
        if variable in COMMON_MISTAKES:
            yield f"{variable} is no variable of {reader}, which would ignore it", COMMON_MISTAKES[variable]
            continue
        name = variable.removeprefix(prefix)
        if name in names:
            continue
        suggestions = difflib.get_close_matches(name, names, 1, cutoff=MIN_SIMILARITY) or _find_reordered_names(
            name, names
        )
        suggestions = suggestions or (_find_longer_names(name, names) if prefix in STRICT_PREFIXES else [])
        if suggestions:
            candidates = " or ".join(f"{prefix}{suggestion}" for suggestion in suggestions)
            yield f"{variable} is no variable of {reader}, which would ignore it", f"Did you mean {candidates}?"


def _find_longer_names(name: str, names: frozenset[str]) -> list[str]:
    """Return the names that start with `name` or contain all its words, shortest first: IB_GID, HCA, THREADS."""
    if BUILD_NAME.search(name):
        return []
    words = set(name.split("_"))
    candidates = [candidate for candidate in names if candidate.startswith(name) or words < set(candidate.split("_"))]
    return sorted(candidates, key=lambda candidate: (len(candidate), candidate))[:MAX_SUGGESTIONS]


def _find_reordered_names(name: str, names: frozenset[str]) -> list[str]:
    """Return the names that have the same words in another order: DISABLE_P2P."""
    words = sorted(name.split("_"))
    return sorted(candidate for candidate in names if sorted(candidate.split("_")) == words)


def _find_invalid_values(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable, (pattern, expected) in VALUES.items():
        value = environment.get(variable, "")
        if value and not re.fullmatch(pattern, value.replace(" ", "")):
            yield f"{variable}={value} is not {expected}", f"Correct {variable}, or unset it."


def _find_empty(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable in NOT_EMPTY:
        if environment.get(variable) == "":
            yield f"{variable} is set, and empty", f"Give {variable} a value, or unset it."


def _is_slow(variable: str, value: str) -> bool:
    if variable in SLOW_VALUES:
        return value.upper() == SLOW_VALUES[variable]
    return value not in ("", "0") if variable in SWITCHES else value != ""
