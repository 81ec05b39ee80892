"""Catalogue pages for exhausted or growing memory (SF2..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF201": Page(
        "a rank was killed for memory",
        "It was killed by SIGKILL, and the kernel's count of memory kills in its cgroup has grown since the start.",
        "Lower per_device_train_batch_size or max_length, set gradient_checkpointing: true or zero_stage: 3, or give "
        "the job more memory.",
        ("deepspeedai/DeepSpeedExamples#498", "hiyouga/LlamaFactory#6755", "QwenLM/Qwen#954"),
        severity="error",
    ),
    "SF202": Page(
        "host memory grows with every step",
        "Anonymous memory at the end of the steps grows steadily through the whole window; page cache and mapped files "
        "do not count. The phase in which it grows is named.",
        "Look for what that phase keeps from step to step: tensors with their graphs, lists, caches without a limit.",
        ("konstantinjdobler/nlp-research-template#18", "huggingface/transformers#12878"),
    ),
    "SF203": Page(
        "GPU memory grows with every step",
        "The tensors that CUDA's allocator counts at the end of the steps, when activations are freed, grow steadily "
        "through the whole window.",
        "Look for tensors that are kept with their graphs: losses that are summed without .item() or .detach(), lists "
        "of outputs, hooks.",
        ("NVIDIA-NeMo/RL#2319", "deepspeedai/DeepSpeed#3002", "huggingface/transformers#12878"),
    ),
    "SF204": Page(
        "GPU memory is fragmented",
        "In many of the newest steps CUDA's allocator returned its cache to the driver and asked again "
        "(num_alloc_retries), while much of its memory was unused between tensors (inactive_split_bytes).",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use packing: true so that steps have one size.",
        ("NVIDIA-NeMo/RL#2319",),
    ),
    "SF205": Page(
        "a step needed much more memory than those before it",
        "It raised the memory peak by a quarter or more, and less than that increase is free now: another step like it "
        "does not fit.",
        "Lower max_length or per_device_train_batch_size, set gradient_checkpointing: true, or use packing: true, "
        "which gives all steps one size.",
    ),
    "SF206": Page(
        "every rank held the whole model in host memory",
        "In other trainers: two or more ranks of a machine held the size of the whole model in their own memory while "
        "it loaded, and keep half of it at most. Surefoot's own ranks read only their parts.",
        "Let each rank read its part: with FSDP cpu_ram_efficient_loading and sync_module_states; with DeepSpeed's "
        "ZeRO-3 create TrainingArguments (HfDeepSpeedConfig) before the model; else device_map to the rank's GPU. Or "
        "start fewer ranks a machine.",
        ("QwenLM/Qwen#954",),
    ),
    "SF207": Page(
        "open files or threads grow towards their limit",
        "A rank's open files (/proc/PID/fd, against its own limit) or its threads (against pids.max of its cgroup) "
        "have grown through most of the run by a quarter of the limit, and half of the limit is used. At the limit the "
        'run ends with "Too many open files" or "can\'t start new thread".',
        "Close what each step opens (files, sockets, shared memory of loader workers: "
        "torch.multiprocessing.set_sharing_strategy), and start no thread or pool in a step. Higher limits (ulimit -n, "
        "pids.max of the cgroup) only postpone the end.",
        ("pytorch/pytorch#973", "pytorch/pytorch#11201"),
    ),
    "SF208": Page(
        "memory of processes that a rank started grows",
        "Their anonymous memory together (Pss_Anon: pages that they copied from their parent count, pages that they "
        "still share do not) grows steadily. The rank's own memory need not grow.",
        "In loader workers, keep the samples in arrays or Arrow tables: reference counts of Python objects in lists "
        "and dicts copy each page that is read. Or use fewer workers. In other processes, look for what they keep.",
        ("pytorch/pytorch#13246",),
    ),
    "SF209": Page(
        "a rank ran out of memory",
        "The allocator of a GPU or of the host refused a request. The finding shows the phase, the tokens of the batch "
        "and the usual ones, the memory by owner, unused fragments, and memory of other processes.",
        "Lower per_device_train_batch_size or max_length, or set gradient_checkpointing: true, zero_stage: 3 or "
        "offload: cpu. `surefoot plan run.yaml` shows which of them fits, and its cost.",
        severity="error",
    ),
}
