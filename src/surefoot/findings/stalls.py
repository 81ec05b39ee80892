"""Catalogue pages for stalled runs and ended processes (SF1..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF101": Page(
        "error",
        "a rank died",
        "Its process is gone, and it had not said that it is through. The exit status or signal comes from whoever "
        "started it; the last phase and step come from its ring in events/, which survives the kill.",
        "Look at what it printed last. A SIGKILL without a memory limit reached comes from a person, the scheduler, or "
        "a machine that ran out of memory as a whole (dmesg). max_restarts goes on from the newest checkpoint.",
        ("hiyouga/LlamaFactory#6755", "QwenLM/Qwen#954"),
    ),
    "SF102": Page(
        "error",
        "a rank was stopped",
        "The state of its process is `stopped`: it got SIGSTOP or SIGTSTP, or a debugger holds it. The others wait.",
        "kill -CONT its process, or end the debugger.",
    ),
    "SF103": Page(
        "error",
        "a rank waits for a disk or a device",
        "Its process is in uninterruptible sleep (state D) and has said nothing for longer than usual.",
        "Look at the file systems the run uses (a network mount whose server is gone?) and at dmesg.",
    ),
    "SF104": Page(
        "error",
        "ranks called different collectives",
        "The Flight Recorders of two ranks show, under the same number of the same group, collectives of another kind, "
        "size or type. Sizes of an all-to-all may differ and do not count.",
        "All ranks must take the same way through the program: no branch on the rank, on its own data, or on whether "
        "an expert got tokens.",
        ("NVIDIA/Megatron-LM#1444", "deepspeedai/DeepSpeed#5066", "QwenLM/Qwen3#275"),
    ),
    "SF105": Page(
        "error",
        "ranks wait for each other in different groups",
        "The Flight Recorders show every rank in a collective, but of groups that the others have not entered.",
        "Collectives of two groups must be called in the same order on every rank that is in both.",
        ("deepspeedai/DeepSpeed#2993", "huggingface/transformers#29980", "huggingface/trl#7103"),
    ),
    "SF106": Page(
        "error",
        "a rank is behind",
        "The others wait in a collective that it never entered (or there are no others); its stack shows the line at "
        "which it stands or computes.",
        "See what it does there. A collective that only some ranks call shows the line after it.",
        ("modelscope/ms-swift#3592", "deepspeedai/DeepSpeed#2993"),
    ),
    "SF107": Page(
        "error",
        "a rank waits for data",
        "It is in the phase `data_wait` for longer than usual, and the processes that prepare them, if any, are "
        "dead, stopped or idle.",
        "Look at the storage of the data. dataset_num_proc: 1 takes worker processes out of the way.",
        ("QwenLM/Qwen3-VL#1892",),
    ),
    "SF108": Page(
        "error",
        "the network does not carry a collective",
        "The Flight Recorders of all ranks show the same collective, asked for and not over; or one rank is in a "
        "collective that another is through with, so what that one sent does not arrive.",
        "The network does not carry it: check the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), firewalls, and "
        "with GPUs peer-to-peer access (NCCL_P2P_DISABLE=1 to compare).",
        ("deepspeedai/DeepSpeed#4433", "sgl-project/sglang#3794", "NVIDIA/nccl#286", "QwenLM/Qwen#970"),
    ),
    "SF109": Page(
        "error",
        "a deadlock inside one process",
        "The rank's main thread waits for a lock or another thread of its own, or no Python thread of it can run at "
        "all: then its witness does not answer, while the handler in C still writes the stacks.",
        "The stacks of all threads are under evidence/. Look for who holds what the main thread waits for.",
        ("modelscope/ms-swift#3592",),
    ),
    "SF110": Page(
        "error",
        "a stall whose cause the evidence does not show",
        "No rank says anything for longer than usual, and none of the other rules applies. The finding lists what "
        "evidence is missing.",
        "Collect what is missing, or report the files under evidence/.",
    ),
    "SF111": Page(
        "error",
        "the run does not begin, or does not end",
        "15 seconds after the first ranks others have not come to the store where they meet (said on the terminal; "
        "after ten minutes the run ends); or no rank has written an event ten minutes after the start; or the run is "
        "still there ten minutes after the last event of all ranks.",
        "Before the beginning: check that all machines run and reach rdzv_endpoint, and that torch can be imported. "
        "After the end: a thread or process that the run started is waited for.",
        ("modelscope/ms-swift#3592", "huggingface/accelerate#1929", "sgl-project/sglang#3794"),
    ),
    "SF112": Page(
        "error",
        "a GPU reports an error",
        "NVIDIA's driver wrote an Xid into the kernel's log while the run had GPUs open; its number says what it is.",
        "Reset the GPU or restart its machine, and have it looked at if the error comes again. The run goes on "
        "from the newest checkpoint on another machine.",
        ("NVIDIA/DCGM#303",),
    ),
}
