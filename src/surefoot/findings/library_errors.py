"""Errors of CUDA, NCCL and rollout servers whose text names a cause. Standard library only.

The texts are those that public reports of users show (issues of PyTorch, NCCL, vLLM and of trainers, read 2026-11).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from surefoot.findings import Finding

SHOWN_CHARS = 300
"""Longest part of an error's line that is repeated as evidence."""


@dataclass(frozen=True)
class LibraryError:
    """One error of a library."""

    pattern: re.Pattern[str] = field(repr=False)
    """Text by which it is recognised, within one line."""
    cause: str
    """Cause, in which {0}, {1} ... are the groups of the pattern."""
    fix: str
    code: str = "SF113"
    confidence: float = 0.9

    def as_finding(self, line: str, place: str = "") -> Finding | None:
        """Return the finding for a line that has this error; None if it has not. `place`: file and line number."""
        match = self.pattern.search(line)
        if match is None:
            return None
        evidence = {"error": line.strip()[:SHOWN_CHARS], **({"line": place} if place else {})}
        return Finding(
            self.code, self.cause.format(*match.groups()), evidence, self.fix.format(*match.groups()), self.confidence
        )


def find_library_error(text: str) -> Finding | None:
    """Return the finding for the cause that a text of several lines names; None if it names none."""
    return next(iter(find_library_errors(text.splitlines(), errors=CAUSES)), None)


def find_library_errors(lines: Iterable[str], file: str = "", errors: Sequence[LibraryError] = ()) -> list[Finding]:
    """Return a finding for each known error in the lines of a file: the causes first, then what follows from them.

    An error that occurs several times is reported at its first line. `file`: its name, for the evidence. `errors`: the
    errors to look for (default: all).
    """
    errors = errors or ERRORS
    first: dict[int, Finding] = {}
    for number, line in enumerate(lines, 1):
        for order, error in enumerate(errors):
            finding = error.as_finding(line, f"{file}:{number}" if file else "")
            if finding is not None:
                first.setdefault(order, finding)
                break
    return [first[order] for order in sorted(first)]


def _error(pattern: str, cause: str, fix: str, code: str = "SF113", confidence: float = 0.9) -> LibraryError:
    return LibraryError(re.compile(pattern, re.IGNORECASE), cause, fix, code, confidence)


CUDA_ERRORS = (
    _error(
        r"no kernel image is available for execution on the device",
        "this build of torch has no code for the compute capability of this GPU",
        "Install the build of torch whose `torch.cuda.get_arch_list()` has the GPU's capability (sm_120 for an RTX "
        "5090, for example): see the install commands on pytorch.org.",
    ),
    _error(
        r"driver on your system is too old \(found version (\d+)\)",
        "the NVIDIA driver (CUDA version {0}) is older than the CUDA of this build of torch",
        "Update the driver, or install a build of torch for an older CUDA (`--index-url .../whl/cu126`, for example).",
    ),
    _error(
        r"driver version is insufficient for CUDA runtime version",
        "the NVIDIA driver is older than the CUDA of this program",
        "Update the driver, or install a build of torch for an older CUDA (`--index-url .../whl/cu126`, for example).",
    ),
    _error(
        r"Found no NVIDIA driver on your system",
        "no NVIDIA driver is visible to this process",
        "In a container: start it with the GPUs (docker run --gpus all, with nvidia-container-toolkit on the host). On "
        "a machine: install the driver; `nvidia-smi` must list the GPUs.",
    ),
    _error(
        r"No CUDA GPUs are available",
        "the driver works, but this process may see no GPU",
        "Check CUDA_VISIBLE_DEVICES (an empty or wrong value hides all GPUs), and whether the job was given GPUs.",
    ),
    _error(
        r"CUDA-capable devices?(?:\(s\))? (?:is/are|is|are) busy or unavailable",
        "another process has this GPU for itself alone (compute mode Exclusive_Process), or did not let it go",
        "`nvidia-smi` shows the process and the compute mode; end the process, or `nvidia-smi -c DEFAULT`.",
    ),
    _error(
        r"invalid device ordinal",
        "a process asked for a GPU number that this machine does not have",
        "Start at most one rank for each visible GPU: check nproc_per_node and CUDA_VISIBLE_DEVICES.",
    ),
    _error(
        r"(?:Error 802|failure 802|system not yet initialized)",
        "CUDA cannot start because the NVSwitches of this machine are not configured: the fabric manager does not run, "
        "or is of another version than the driver",
        "Install and start nvidia-fabricmanager in exactly the version of the driver; `nvidia-smi -q` then shows "
        "Fabric State: Completed.",
    ),
    _error(
        r"(?:Error 803|unsupported display driver / cuda driver combination)",
        "the libraries of the CUDA driver do not belong to the driver that the kernel has loaded",
        "Remove other libcuda.so from LD_LIBRARY_PATH (cuda-compat), or restart the machine after a driver update.",
    ),
    _error(
        r"CUDA unknown error",
        "the driver did not start for this process: its module nvidia-uvm is not loaded (often after a suspend), or "
        "CUDA_VISIBLE_DEVICES was changed after the program had begun",
        "Run `modprobe -r nvidia_uvm && modprobe nvidia_uvm` or restart; set CUDA_VISIBLE_DEVICES before Python.",
        confidence=0.7,
    ),
    _error(
        r"uncorrectable (?:NVLink|ECC) error",
        "the memory or the NVLink of this GPU is damaged",
        "Take the GPU out of use and have it checked (`nvidia-smi -q -d ECC,ROW_REMAPPER`); the run continues "
        "elsewhere.",
    ),
    _error(
        r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
        "cuBLAS found no memory for its workspace on the GPU",
        "Lower max_tokens_per_batch, or end other processes on that GPU (`nvidia-smi`).",
        code="SF209",
    ),
    _error(
        r"CUDA out of memory.*?[Tt]ried to allocate ([\d.]+ \w+)",
        "a GPU had no more memory: {0} were requested",
        "Lower max_tokens_per_batch, turn gradient_checkpointing on, or raise zero_stage; `surefoot plan` computes "
        "what fits.",
        code="SF209",
    ),
    _error(
        r"device-side assert triggered",
        "an index was outside its table in a kernel: a token id or a label beyond the vocabulary, or an expert number",
        "Run once with CUDA_LAUNCH_BLOCKING=1, which names the line; compare the tokenizer's size with vocab_size.",
        confidence=0.8,
    ),
    _error(
        r"Cannot re-initialize CUDA in forked subprocess",
        "a process that had used CUDA was forked, and the child uses CUDA too",
        "Start worker processes by spawn (VLLM_WORKER_MULTIPROC_METHOD=spawn for vLLM).",
    ),
    _error(
        r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0\. Your (.+?) GPU",
        "a {0} cannot compute in bfloat16",
        "Serve with --dtype half, or use a GPU from the Ampere generation on.",
    ),
    _error(
        r"undefined symbol: (\w*(?:nccl|cublas|cudnn|nvJitLink|cusparse)\w*)",
        "a library of another CUDA version is loaded before torch's own: it lacks {0}",
        "Remove CUDA folders from LD_LIBRARY_PATH: torch's wheels bring their libraries along.",
    ),
)
"""Errors of CUDA and its libraries."""

NCCL_ERRORS = (
    _error(
        r"Duplicate GPU detected ?: ?rank (\d+) and rank (\d+) both on CUDA device (\w+)",
        "ranks {0} and {1} use the same GPU (PCI bus {2})",
        "Give each rank a GPU of its own: torch.cuda.set_device(LOCAL_RANK), and as many visible GPUs as ranks.",
    ),
    _error(
        r"Error while creating shared memory segment (\S+) \(size (\d+)\)",
        "/dev/shm is full or too small for NCCL: it has no {1} bytes for {0}",
        "Give the container more: --shm-size=16g or --ipc=host. Segments of dead runs (/dev/shm/nccl-*) may be "
        "deleted.",
    ),
    _error(
        r"(?:Bootstrap ?: no socket interface found|with family \d+ is neither AF_INET)",
        "no network interface of this machine has the name that NCCL_SOCKET_IFNAME gives",
        "Set NCCL_SOCKET_IFNAME to an interface that `ip -brief addr` shows on each machine, or unset it.",
    ),
    _error(
        r"(?:Call to )?ibv_reg_mr\w* failed with error Cannot allocate memory",
        "this process may not lock enough memory for InfiniBand or RoCE",
        "Raise the limit (ulimit -l unlimited; --ulimit memlock=-1 for a container).",
    ),
    _error(
        r"ibv_modify_qp failed with error (?:\d+ )?(Invalid argument|Connection timed out|No such device)",
        "RoCE or InfiniBand does not connect the machines ({0}): the GID or the MTU of the two ends does not fit",
        "Set NCCL_IB_GID_INDEX to the RoCE v2 entry that `show_gids` lists on all machines (often 3), and equal MTUs; "
        "NCCL_IB_DISABLE=1 to compare.",
    ),
    _error(
        r"NET/IB ?: ?Got completion.*(?:error|status=)\D*12",
        "data over RoCE or InfiniBand do not arrive (completion 12, retries exceeded): wrong GID, or the network drops "
        "them",
        "Set NCCL_IB_GID_INDEX to the RoCE v2 entry that `show_gids` lists on all machines; check PFC and the cables.",
    ),
    _error(
        r"onnect to (\S+) (?:failed ?: ?|returned \d+ ?\()(No route to host|Connection timed out|Network is "
        r"unreachable)",
        "the address {0} cannot be reached from here ({1}): another machine told NCCL an address of a network that "
        "this one is not in, or a firewall is between them",
        "Set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface of the network that joins the machines, and "
        "open all ports between them.",
    ),
    _error(
        r"Failed to bind NVLink SHARP",
        "NVLink SHARP (multicast between GPUs) does not work on this machine: its fabric is in a bad state",
        "Restart nvidia-fabricmanager (in the driver's version) or the machine; NCCL_NVLS_ENABLE=0 works without it.",
    ),
    _error(
        r"Mismatched NCCL version detected ?: ?ncclResult.*|NCCL version mismatch",
        "the ranks have different versions of NCCL",
        "Install the same torch (and NCCL) in all environments of the run; look for another libnccl in "
        "LD_LIBRARY_PATH.",
    ),
    _error(
        r"(?:errno: 98|Errno 98|EADDRINUSE|address already in use)",
        "the port is in use: another run or server has it, or an earlier one did not end",
        "`ss -ltnp` shows the process. End it, or choose another port (MASTER_PORT, rdzv_endpoint, --port).",
    ),
    _error(
        r"received 0 items of ancdata",
        "this process may open too few files: workers send each tensor as an open file",
        "Raise the limit (ulimit -n 65536), or torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
)
"""Errors of NCCL, of the rendezvous and of data workers."""

CONSEQUENCES = (
    _error(
        r"onnect to (\S+) (?:failed ?: ?|returned \d+ ?\()Connection refused",
        "nobody listens at {0}: the rank there has ended or has not begun, or a firewall refuses its port",
        "Read the output of that rank first. If it runs, open all ports between the machines.",
        confidence=0.7,
    ),
    _error(
        r"Watchdog caught collective operation timeout.*SeqNum=(\d+), OpType=(\w+)",
        "a rank waited in collective number {0} ({1}) until its timeout: another rank never entered it, or called "
        "another one",
        "Compare the numbers of all ranks in this log: the one that is behind, or silent, has the cause. `surefoot "
        "train` and `surefoot.watch` name it while it hangs.",
        code="SF110",
        confidence=0.5,
    ),
    _error(
        r"(?:Connection closed by remote peer|remote process exited or there was a network error|ncclRemoteError) "
        r"?(\S*)",
        "a rank lost its connection to another one, which has ended or is cut off",
        "The first error of the other ranks has the cause: read their output.",
        code="SF101",
        confidence=0.5,
    ),
    _error(
        r"(?:exitcode *: *-9|Signal 9 \(SIGKILL\) received)",
        "a process was killed (SIGKILL): in most cases by the kernel, because the machine or the container had no "
        "memory",
        "`dmesg | grep -i oom` on that machine tells. Fewer copies of the weights on the host (zero_stage: 3, no "
        "offload), or more memory.",
        code="SF101",
        confidence=0.6,
    ),
)
"""Errors of a process that may follow from the end or the delay of another one."""

SERVER_ERRORS = (
    _error(
        r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory utilization "
        r"\(([\d.]+)",
        "vLLM wants a share of {2} of the GPU's {1} GiB, and only {0} GiB are free: the trainer or another process has "
        "the rest",
        "Lower --gpu-memory-utilization below what is free, give the server GPUs of its own, or end the process that "
        "`nvidia-smi` shows.",
    ),
    _error(
        r"No available memory for the cache blocks",
        "after the weights no memory is left for vLLM's KV cache",
        "Raise --gpu-memory-utilization, lower --max-model-len and --max-num-seqs, or use more GPUs "
        "(--tensor-parallel-size).",
    ),
    _error(
        r"max seq len \((\d+)\), \(?([\d.]+ GiB) KV cache is needed, which is larger than the available KV cache "
        r"memory "
        r"\(([\d.]+ GiB)",
        "a row of {0} tokens needs {1} of KV cache in vLLM, and {2} are left",
        "Set --max-model-len to the prompt and completion that you need (not the model's longest), or raise "
        "--gpu-memory-utilization.",
    ),
    _error(
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len",
        "--max-model-len {0} is more than the model's context",
        "Lower --max-model-len to the context in the model's config.json.",
    ),
    _error(
        r"LoRA rank (\d+) is greater than max_lora_rank (\d+)",
        "the adapter has rank {0}, and the server takes at most {1}",
        "Start vLLM with --max-lora-rank {0} (8, 16, 32, 64, 128, 256 and more are allowed values).",
    ),
    _error(
        r"Total number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        "the model's {0} attention heads cannot be cut over {1} GPUs",
        "Choose a --tensor-parallel-size that divides {0}.",
    ),
    _error(
        r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
        "the server wants {0} GPUs and sees {1}",
        "Lower --tensor-parallel-size (times --pipeline-parallel-size) to {1}, or check CUDA_VISIBLE_DEVICES.",
    ),
    _error(
        r"Expandable segments are not compatible with memory pool",
        "vLLM's sleep mode does not work with expandable segments of PyTorch's allocator",
        "Unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the server (vllm-project/vllm#11743).",
    ),
    _error(
        r"Model architectures \['(\w+)'\] are not supported",
        "this version of vLLM does not know {0}",
        "Update vLLM, or generate with the trained model itself (rollout_engine: local).",
    ),
)
"""Errors of vLLM at its start."""

CAUSES = (*CUDA_ERRORS, *SERVER_ERRORS, *NCCL_ERRORS)
"""Errors that name a cause."""

ERRORS = (*CAUSES, *CONSEQUENCES)
"""All known errors: those that name a cause stand before those that may follow from them."""
