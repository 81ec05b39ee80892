"""Catalogue pages for runs that are slower than necessary (SF3..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF301": Page(
        "warning",
        "steps have become slower",
        "For as many tokens, the newest steps (at least 20, and 20 seconds) take twice as long as twenty earlier ones "
        "did; the phase that grew most is named. None of the other causes was seen.",
        "Look at what else runs on the machine, at its clocks and temperature, and at what that phase does more.",
    ),
    "SF302": Page(
        "warning",
        "steps wait for their data",
        "In nearly every step a rank spends a quarter of the time or more in the phase `data_wait`.",
        "Look at the storage of the data and of the cache; raise dataset_num_proc while they are being prepared.",
        ("oumi-ai/oumi#646",),
    ),
    "SF303": Page(
        "warning",
        "one rank is slower than the others",
        "The Flight Recorders show when each rank came to the collectives they share: again and again the same one is "
        "last, and the others wait for it in a fifth of the time or more.",
        "Look at what else runs on its machine, at its clocks and temperature, and at its part of the data.",
    ),
    "SF304": Page(
        "warning",
        "most of the time goes into communication",
        "In nearly every step every rank spends half of the time or more in the phase `collectives`, so none of them "
        "is the cause; or, on a CPU, all are in forward, backward and communication and compute nothing.",
        "Raise gradient_accumulation_steps or the batch, use fewer ranks or a lower zero_stage, and check that the "
        "fast network interface is used.",
        ("modelscope/ms-swift#9719", "QwenLM/Qwen#970"),
    ),
    "SF305": Page(
        "warning",
        "Python's garbage collector takes much of the time",
        "The collector reports its own beginnings and ends; their sum is a tenth of the time of the newest steps.",
        "Call gc.freeze() after what is kept was made, or raise gc.set_threshold(). Look for what makes many objects.",
        ("pytorch/torchtitan#148",),
    ),
    "SF306": Page(
        "warning",
        "the container may not use the CPUs it wants",
        "In a quarter of the kernel's periods or more the cgroup had used up its share of the CPUs (nr_throttled in "
        "cpu.stat).",
        "Give the container more CPUs (limits.cpu, --cpus, --cpus-per-task), or start fewer threads: OMP_NUM_THREADS.",
    ),
    "SF307": Page(
        "warning",
        "GPUs are busy and do no work",
        "NVML shows a GPU busy nine tenths of the time or more, at a quarter of its power limit or less, for half a "
        "minute: its kernels wait, in NCCL for another rank, or for memory.",
        "Run `surefoot doctor`: NCCL variables that are wrong for this machine are the usual cause. Then look at the "
        "other ranks, at the interface that NCCL chose (NCCL_DEBUG=INFO), and at batches that are very small.",
        ("QwenLM/Qwen#970",),
    ),
    "SF308": Page(
        "warning",
        "a GPU is slowed down",
        "NVML names heat, a power brake or a hardware slowdown as the reason for its low clocks, in half of the looks "
        "or more. A power cap under full load is none of these.",
        "Look at its cooling and its power supply; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`.",
    ),
    "SF309": Page(
        "warning",
        "memory is read back from swap",
        "The machine reads megabytes in each second back from swap, and memory of the ranks lies there.",
        "The run needs more memory than the machine has: lower per_device_train_batch_size or max_length, use "
        "zero_stage: 3 over more machines, or end what else runs there.",
    ),
    "SF310": Page(
        "warning",
        "the GPUs wait for the program to start kernels",
        "NVML says that the GPUs are busy for less than 60 % of the time, while steps are forward, backward and "
        "optimizer for 70 % and more, and the rank's process uses about one core or more: many small kernels. "
        "Not said of runs that offload.",
        "Raise per_device_train_batch_size or max_length, set torch_compile: true; in other trainers use fused experts "
        "in place of a loop over them (SF310 is what a loop over 60 experts looks like).",
        ("QwenLM/Qwen3#275", "deepseek-ai/DeepSeek-MoE#5"),
    ),
    "SF311": Page(
        "warning",
        "the model computes padding",
        "The attention masks that the model is given, summed over the newest steps: the share of tokens that only fill "
        "rows up to the longest of their batch, times the share of forward and backward in a step. Surefoot's own runs "
        "have none: rows are laid end to end.",
        "Lay rows end to end (TRL: packing or padding_free; LLaMA-Factory: packing, neat_packing; ms-swift: packing, "
        "padding_free; axolotl: sample_packing), or batch rows of like length (group_by_length).",
    ),
    "SF312": Page(
        "warning",
        "ranks wait for those with busier experts",
        "With expert parallelism: over 50 steps the busiest rank's experts got a quarter more rows than the mean one, "
        "and the Flight Recorders show that ranks wait for others in the all-to-alls of experts in a fifth of the "
        "time or more.",
        "Set router_aux_loss_coef where routers are trained; use a smaller expert_parallel_size, or "
        "expert_parallel_size: auto, which measures; more tokens a step even experts out.",
    ),
    "SF313": Page(
        "warning",
        "a rank waits for a core",
        "The kernel counts how long a thread is ready to run and gets no core (/proc/PID/task/TID/schedstat), which is "
        "read of the thread that trains. Either some rank's steps take twice as long as they did, and half of what was "
        "added or more is such waiting; or the others wait for one rank in half of the time, because it waits for a "
        "core. Where cores are too few from the first step on there is nothing to compare with: the doctor counts "
        "them before (SF714).",
        "See with `top` what else runs on those cores: another job, data workers, threads of the run itself "
        "(OMP_NUM_THREADS). Where nothing does, the container's share is used up: look at nr_throttled in cpu.stat of "
        "its cgroup. Give each rank cores of its own.",
    ),
}
