"""Catalogue pages for stalled runs and ended processes (SF1..)."""

from surefoot.findings.page import Page

ON_ONE_MACHINE = (
    "With GPUs, compare with NCCL_P2P_DISABLE=1: if that helps, turn the IOMMU and ACS off (kernel parameter iommu=pt) "
    "or update the driver. Check /dev/shm (`df -h /dev/shm`) and the kernel log for Xid. On the CPU, check that the "
    "loopback interface is up."
)
"""Advice for a collective whose data do not arrive between ranks of one machine."""

PAGES = {
    "SF101": Page(
        "a rank died",
        "Its process exited without reporting its end. The exit status or signal comes from the process that started "
        "it; the last phase and step come from its ring in events/, which survives a kill.",
        "Read its last output. If it was killed (SIGKILL), find out by whom: a person, the scheduler, or the kernel of "
        "a machine without memory (dmesg). Native code that aborted leaves its stack in events/rank-NNNNN.stacks. With "
        "max_restarts the run restarts from the newest checkpoint.",
        ("hiyouga/LlamaFactory#6755", "QwenLM/Qwen#954"),
        severity="error",
    ),
    "SF102": Page(
        "a rank was stopped",
        "The state of its process is `stopped`: it received SIGSTOP or SIGTSTP, or a debugger holds it. The other "
        "ranks wait for it.",
        "Run kill -CONT on its process, or end the debugger.",
        severity="error",
    ),
    "SF103": Page(
        "a rank waits for a disk or a device",
        "Its process, or one of its threads in every sample, was in uninterruptible sleep (state D), and it waits for "
        "no other rank.",
        "Look at the file systems that the run uses (a network mount whose server is down?) and at dmesg.",
        severity="error",
    ),
    "SF104": Page(
        "ranks called different collectives",
        "The Flight Recorders of two ranks show collectives of different kind, size or type under the same number of "
        "the same group. Sizes of an all-to-all may differ and do not count.",
        "Let all ranks take the same path through the program: no branch on the rank, on its own data, or on whether "
        "an expert got tokens.",
        ("NVIDIA/Megatron-LM#1444", "deepspeedai/DeepSpeed#5066", "QwenLM/Qwen3#275"),
        severity="error",
    ),
    "SF105": Page(
        "ranks wait for each other in different groups",
        "The Flight Recorders show every rank in a collective, but of groups that the others have not entered.",
        "Call the collectives of two groups in the same order on every rank that is in both.",
        ("deepspeedai/DeepSpeed#2993", "huggingface/transformers#29980", "huggingface/trl#7103"),
        severity="error",
    ),
    "SF106": Page(
        "a rank is behind",
        "The other ranks wait in a collective that it never entered (or there are no others); its stack shows the line "
        "that it executes. With NCCL its GPU may not have come to a collective that the rank has called: then a kernel "
        "that was called before does not end.",
        "Inspect that line. If only some ranks call a collective, the stack shows the line after it.",
        ("modelscope/ms-swift#3592", "deepspeedai/DeepSpeed#2993"),
        severity="error",
    ),
    "SF107": Page(
        "a rank waits for data",
        "It has been in the phase `data_wait` for longer than usual. `children` has the states of its worker "
        "processes; the cause names one that is dead, stopped, or waits for a disk.",
        "Look at the storage of the data and at the worker processes; dataset_num_proc: 1 does without them.",
        ("QwenLM/Qwen3-VL#1892",),
        severity="error",
    ),
    "SF108": Page(
        "the data of a collective do not arrive",
        "The Flight Recorders show all ranks in the same unfinished collective, or one rank in a collective that "
        "another has finished, so the data that were sent do not arrive. Between machines the network is at fault, on "
        "one machine the connection of its GPUs.",
        "Check the network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), firewalls, and with GPUs peer-to-peer "
        "access (NCCL_P2P_DISABLE=1 to compare).",
        ("deepspeedai/DeepSpeed#4433", "sgl-project/sglang#3794", "NVIDIA/nccl#286", "QwenLM/Qwen#970"),
        severity="error",
    ),
    "SF109": Page(
        "a deadlock inside one process",
        "The rank's main thread waits for a lock or another of its threads. Or no Python thread of it can run: its "
        "evidence server does not respond, while the signal handler in C still writes the stacks.",
        "Read the stacks of all its threads under evidence/ to see which one holds what the main thread waits for.",
        ("modelscope/ms-swift#3592",),
        severity="error",
    ),
    "SF110": Page(
        "a stall whose cause the evidence does not show",
        "No rank has recorded an event for longer than usual, and no other rule applies. The finding lists the missing "
        "evidence.",
        "Collect what is missing, or report the files under evidence/.",
        severity="error",
    ),
    "SF111": Page(
        "the run does not begin, or does not end",
        "15 seconds after the first ranks, others have not reached the store where ranks meet (after ten minutes the "
        "run ends). Or no rank has recorded an event ten minutes after the start. Or the run has not exited ten "
        "minutes after the last event of all ranks.",
        "Before the beginning: check that all machines run with the same nnodes and rdzv_endpoint and reach it, and "
        "that torch can be imported (a hung file system?). At the end: the run waits for a thread or process that it "
        "started; `py-spy dump` shows which.",
        ("modelscope/ms-swift#3592", "huggingface/accelerate#1929", "sgl-project/sglang#3794"),
        severity="error",
    ),
    "SF112": Page(
        "a GPU reports an error",
        "NVIDIA's driver wrote an Xid into the kernel log while the run used GPUs; its number says what happened.",
        "Reset the GPU or restart its machine, and have it checked if the error comes again. On another machine the "
        "run continues from the newest checkpoint.",
        ("NVIDIA/DCGM#303",),
        severity="error",
    ),
    "SF113": Page(
        "a library names the cause of its error",
        "The text of an error of CUDA, NCCL or vLLM, raised in a rank, in the log of a rollout server, or in a log "
        "given to `surefoot explain LOG`, is one of those whose cause is known.",
        "The finding has the fix for its error.",
        ("pytorch/pytorch#35710", "NVIDIA/nccl#342", "NVIDIA/nccl#1837", "vllm-project/vllm#11743"),
        severity="error",
    ),
    "SF114": Page(
        "a query of a GPU does not return",
        "The stack of the rank shows that it waits for the driver: a start of CUDA, a count of devices, or a question "
        "for free memory. It waits for no other rank, and for no network.",
        "See whether `nvidia-smi` answers, and read the kernel log for Xid. Turn persistence mode on (nvidia-smi -pm "
        "1, or nvidia-persistenced), so that the driver need not start for each process. If it never answers, reset "
        "the GPU or restart the machine.",
        ("NVIDIA/DCGM#303",),
        severity="error",
    ),
}
