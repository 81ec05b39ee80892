"""Catalogue pages for runs that are slower than necessary (SF3..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF301": Page(
        "steps have become slower",
        "For as many tokens, the newest steps (at least 20, and 20 seconds) take twice as long as twenty earlier ones, "
        "and no other cause was found. The phase that grew most is named.",
        "Look at what else runs on the machine, at its clocks and temperature, and at what that phase does more.",
    ),
    "SF302": Page(
        "steps wait for their data",
        "In nearly every step a rank, or one rank or another, spends a quarter of the time or more in the phase "
        "`data_wait`. Samples of the rank's process and its workers in that phase tell why.",
        "Look at the storage of the data, and at what the rank and its workers do while it waits.",
        ("oumi-ai/oumi#646",),
    ),
    "SF303": Page(
        "one rank is slower than the others",
        "The Flight Recorders show when each rank entered the collectives that all share: the same rank is last again "
        "and again, and the others wait for it in a fifth of the time or more.",
        "Look at what else runs on its machine or device, at its clocks and temperature, and at its part of the data.",
    ),
    "SF304": Page(
        "most of the time goes into communication",
        "In nearly every step every rank spends half of the time or more in the phase `collectives`, so none of them "
        "is the cause. Or, on a CPU, all ranks are in forward, backward and communication and compute nothing.",
        "Raise gradient_accumulation_steps or the batch, use fewer ranks or a lower zero_stage, and check that ranks "
        "use the fast network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
        ("modelscope/ms-swift#9719", "QwenLM/Qwen#970"),
    ),
    "SF305": Page(
        "Python's garbage collector takes much of the time",
        "Its collections take a tenth of the time of the newest steps or more, on one rank or on several in turn: each "
        "step creates many Python objects, or millions are kept alive.",
        "Call gc.freeze() after creating what is kept, or raise gc.set_threshold(). Look for what creates many "
        "objects.",
        ("pytorch/torchtitan#148",),
    ),
    "SF306": Page(
        "the container has used up its CPU quota",
        "In a quarter of the kernel's periods or more the cgroup had to wait, because its CPU quota was used up "
        "(nr_throttled in cpu.stat).",
        "Give the container more CPUs (limits.cpu, --cpus, --cpus-per-task), or start fewer threads: OMP_NUM_THREADS.",
    ),
    "SF307": Page(
        "GPUs are busy and do no work",
        "For half a minute NVML shows a GPU that is busy nine tenths of the time or more at a quarter of its power "
        "limit or less: its kernels wait, in NCCL for another rank, or for memory.",
        "Run `surefoot doctor`: NCCL variables that are wrong for this machine are the usual cause. Then look at the "
        "other ranks, at the interface that NCCL chose (NCCL_DEBUG=INFO), and at batches that are very small.",
        ("QwenLM/Qwen#970",),
    ),
    "SF308": Page(
        "a GPU is slowed down",
        "In half of its samples or more, NVML names heat, a power brake or a hardware slowdown as the reason for low "
        "clocks. A power cap under full load does not count.",
        "Check its cooling and its power supply; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` shows details.",
    ),
    "SF309": Page(
        "memory is read back from swap",
        "Memory of the ranks is in swap, and the machine reads megabytes in each second back from it.",
        "The run needs more memory than the machine has: lower per_device_train_batch_size or max_length, use "
        "zero_stage: 3 over more machines, or end other programs on the machine.",
    ),
    "SF310": Page(
        "the GPUs wait for the program to start kernels",
        "NVML shows the GPUs busy for less than 60 % of the time, while steps are forward, backward and optimizer for "
        "70 % or more, and the rank's process uses about one core: it launches many small kernels. Runs that offload "
        "are not judged.",
        "Raise per_device_train_batch_size or max_length, or set torch_compile: true; in other trainers use fused "
        "experts instead of a loop over them.",
        ("QwenLM/Qwen3#275", "deepseek-ai/DeepSeek-MoE#5"),
    ),
    "SF311": Page(
        "the model computes padding",
        "The model's attention masks over the newest steps: the share of padding tokens, times the share of forward "
        "and backward in a step, is a quarter or more. Surefoot's own runs have no padding.",
        "Pack the rows (TRL: packing or padding_free; LLaMA-Factory: packing, neat_packing; ms-swift: packing, "
        "padding_free; axolotl: sample_packing), or batch rows of similar length (group_by_length).",
    ),
    "SF312": Page(
        "ranks wait for those with busier experts",
        "With expert parallelism: over 50 steps the busiest rank's experts got a quarter more rows than the mean, and "
        "the Flight Recorders show that ranks wait for others in the experts' all-to-alls in a fifth of the time or "
        "more.",
        "Set router_aux_loss_coef if routers are trained. Use a smaller expert_parallel_size, or expert_parallel_size: "
        "auto, which measures. More tokens in a step make the use of experts more even.",
    ),
    "SF313": Page(
        "a rank waits for a core",
        "The kernel counts how long the training thread is ready to run but gets no core "
        "(/proc/PID/task/TID/schedstat). Either a rank's steps take twice as long as before, and half of the added "
        "time or more is such waiting; or the other ranks spend half of their time waiting for a rank that waits for a "
        "core. If cores are too few from the first step on, the doctor reports it instead (SF714).",
        "See with `top` what else runs on those cores: another job, data workers, threads of the run itself "
        "(OMP_NUM_THREADS). If nothing does, the container's CPU quota is used up (nr_throttled in cpu.stat of its "
        "cgroup). Give each rank cores of its own.",
    ),
}
