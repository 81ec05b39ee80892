"""Catalogue pages for exhausted or growing memory (SF2..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF201": Page(
        "error",
        "a rank was killed for memory",
        "It was killed by SIGKILL, and the kernel's count of memory kills in its cgroup has grown since the start.",
        "Lower per_device_train_batch_size or max_length, set gradient_checkpointing: true or zero_stage: 3, or give "
        "the job more memory.",
        ("deepspeedai/DeepSpeedExamples#498", "hiyouga/LlamaFactory#6755", "QwenLM/Qwen#954"),
    ),
    "SF202": Page(
        "warning",
        "memory of the host grows with every step",
        "Anonymous memory (of no file, so no page cache) at the end of steps lies on a line that rises through the "
        "whole window; the phase in which it grows is named. Growth of mapped files is none.",
        "Look at what that phase keeps: lists of tensors with their graphs, caches without limit, metrics as tensors.",
        ("konstantinjdobler/nlp-research-template#18", "huggingface/transformers#12878"),
    ),
    "SF203": Page(
        "warning",
        "memory of the GPU grows with every step",
        "What CUDA's allocator counts as tensors at the end of steps rises steadily through the whole window; "
        "activations are given back by then.",
        "Look for tensors that are kept with their graphs: losses that are summed without .item() or .detach(), lists "
        "of outputs, hooks.",
        ("NVIDIA-NeMo/RL#2319", "deepspeedai/DeepSpeed#3002", "huggingface/transformers#12878"),
    ),
    "SF204": Page(
        "warning",
        "memory of the GPU is cut up",
        "In many of the newest steps CUDA's allocator gave back what it held and asked the driver again "
        "(num_alloc_retries), while much of it lay unused between tensors (inactive_split_bytes).",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use packing: true so that steps have one size.",
        ("NVIDIA-NeMo/RL#2319",),
    ),
    "SF205": Page(
        "warning",
        "a step needed much more memory than those before it",
        "The peak after that step is a quarter higher than before it, and what is left is less than the difference: "
        "another step like it does not fit.",
        "Lower max_length or per_device_train_batch_size, or use packing: true, with which all steps have one size; "
        "gradient_checkpointing: true makes what depends on the batch smaller.",
    ),
    "SF206": Page(
        "warning",
        "every rank held the whole model in host memory",
        "In other trainers: while the model loaded, memory of the ranks' own peaked at the size of all of it, on two "
        "ranks of a machine or more, and they keep half of it at most. Surefoot's own ranks read their slices.",
        "Let each rank read its part: with FSDP cpu_ram_efficient_loading and sync_module_states; with DeepSpeed's "
        "ZeRO-3 create TrainingArguments (HfDeepSpeedConfig) before the model; else device_map to the rank's GPU; or "
        "start fewer ranks a machine.",
        ("QwenLM/Qwen#954",),
    ),
    "SF207": Page(
        "warning",
        "open files or threads grow towards their limit",
        "What a rank has open (/proc/PID/fd, against its own limit) or its threads (against pids.max of its cgroup) "
        "have grown through eight tenths of the run's steps by a quarter of the limit, and half of it is used. At the "
        'limit the run ends with "Too many open files" or "can\'t start new thread".',
        "Close what each step opens (files, sockets, shared memory of loader workers: "
        "torch.multiprocessing.set_sharing_strategy), and do not start a thread or a pool in each. ulimit -n and the "
        "cgroup's pids.max put it off.",
        ("pytorch/pytorch#973", "pytorch/pytorch#11201"),
    ),
    "SF208": Page(
        "warning",
        "memory of processes that a rank started grows",
        "Their own anonymous memory together (Pss_Anon: what they copied of their parent's counts, what they still "
        "share does not) rises steadily, seen every few seconds. The rank's own memory need not grow.",
        "In loader workers: keep the samples in arrays or Arrow tables, not in lists and dicts of Python objects, "
        "whose reference counts copy each page that is read; or fewer workers. In others: look at what they keep.",
        ("pytorch/pytorch#13246",),
    ),
    "SF209": Page(
        "error",
        "a rank got no more memory",
        "The allocator of a GPU, or of the host, refused it. The rank tells where it was, the tokens of its batch and "
        "the usual ones, what lies there by owner, what lies unused in pieces, and what other processes hold.",
        "Lower per_device_train_batch_size or max_length, or set gradient_checkpointing: true, zero_stage: 3 or "
        "offload: cpu; `surefoot plan run.yaml` says which of them fits, and what each costs.",
    ),
}
