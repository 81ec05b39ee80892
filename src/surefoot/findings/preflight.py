"""Catalogue pages for problems that are found before a run starts (SF7..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF701": Page(
        "warning",
        "too little shared memory",
        "NCCL passes data between the GPUs of one machine through /dev/shm; Docker's default of 64 MiB is too little.",
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
        ("pytorch/torchtitan#853", "NVIDIA/nccl#342", "huggingface/accelerate#1929"),
    ),
    "SF702": Page(
        "warning",
        "too little memory may be locked",
        "InfiniBand and RoCE need buffers that the kernel may not move; the limit of this process is below 1 GiB.",
        "ulimit -l unlimited, in the launcher too: LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 in Docker.",
        ("NVIDIA/nccl-tests#206",),
    ),
    "SF703": Page(
        "warning",
        "few files may be open",
        "The limit of this process is below 1024.",
        "ulimit -n 65536, in the launcher too.",
        ("pytorch/pytorch#973",),
    ),
    "SF704": Page(
        "error",
        "the name of this machine leads back to itself",
        "Other machines are told to come to the address of the host's name, or of rdzv_endpoint, which is one of the "
        "loopback interface.",
        "Put the machine's own address into /etc/hosts in place of 127.0.1.1, or set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME.",
        ("ray-project/ray#37461", "meta-pytorch/data#1142"),
    ),
    "SF705": Page(
        "error",
        "a network interface that is not there",
        "A variable names no interface of this machine, one that is down, or leaves the loopback interface in.",
        "Set it to an interface that `ip addr` shows with an address of the network between the machines, or unset it.",
        ("horovod/horovod#700", "NVIDIA/nccl#286", "QwenLM/Qwen#970"),
    ),
    "SF706": Page(
        "warning",
        "InfiniBand is not used as it could be",
        "From the ports and GIDs under /sys/class/infiniband: a port that is not active, an index without an address "
        "that is routed, or a variable that switches it off or names no adapter of this machine.",
        "Look at `ibstat` and `show_gids`; on RoCE set NCCL_IB_GID_INDEX to a RoCE v2 GID with an IP address, or unset "
        "it: NCCL finds one since 2.21.",
        ("NVIDIA/nccl#426", "pytorch/pytorch#81628"),
    ),
    "SF707": Page(
        "warning",
        "network cards cannot read GPU memory",
        "The machine has both, and the module that connects them is not loaded. Newer drivers can do without "
        "(DMA-BUF); NCCL_DEBUG=INFO shows GDRDMA where it works.",
        "modprobe nvidia-peermem, on every machine.",
        ("NVIDIA/nccl#897",),
    ),
    "SF708": Page(
        "warning",
        "the IOMMU stands between the GPUs",
        "It is on, and not in pass-through mode: peer-to-peer copies may hang, or be slower than through host memory.",
        "Boot with iommu=pt (or intel_iommu=off, amd_iommu=off) and disable ACS on the PCIe switches; "
        "NCCL_P2P_DISABLE=1 to compare.",
        ("NVIDIA/nccl#257", "stas00/ml-engineering#1"),
    ),
    "SF709": Page(
        "warning",
        "versions that do not work together",
        "From a table of what each needs and what is known to be broken, with its sources in known_issues.py and "
        "versions.py of diagnostics/preflight.",
        "Update the driver or the kernel, or install a torch that was built for this driver.",
        (
            "hiyouga/LlamaFactory#2672",
            "Lightning-AI/pytorch-lightning#19425",
            "huggingface/accelerate#1929",
            "pytorch/pytorch#167244",
            "pytorch/pytorch#174338",
        ),
    ),
    "SF710": Page(
        "warning",
        "an environment variable that does not help",
        "A name that NCCL does not know but nearly does, or one for looking for faults that makes every run slow.",
        "Correct or unset it, on all machines alike.",
        ("QwenLM/Qwen#970",),
    ),
    "SF711": Page(
        "error",
        "output_dir cannot take what a run writes",
        "A small file was written there, synced, renamed and deleted; or the file system has no room for more files.",
        "Choose another output_dir, or repair the file system.",
        ("awslabs/awsome-distributed-ai#1225",),
    ),
    "SF712": Page(
        "warning",
        "the host of rdzv_endpoint is not known here",
        "Its name has no address on this machine, or the name server does not answer.",
        "Use a name or address that all machines know. A service of Kubernetes may need a moment to be published.",
    ),
    "SF713": Page(
        "warning",
        "small packets on a fast network",
        "RoCE runs over an interface whose MTU is below 4200 bytes; a message of the card holds 4096.",
        "ip link set dev INTERFACE mtu 9000, on the switches and all machines.",
        ("NVIDIA/nccl#1957",),
    ),
    "SF714": Page(
        "warning",
        "more ranks or threads than CPUs",
        "What the ranks start, against the affinity and the quota of this process.",
        "Give the run more cores (taskset, --cpus-per-task, limits of the container), start fewer ranks, or set "
        "OMP_NUM_THREADS to the CPUs per rank.",
    ),
    "SF715": Page(
        "warning",
        "the GPUs that the run asks for are not here",
        "Counted under /proc/driver/nvidia, less what CUDA_VISIBLE_DEVICES hides.",
        "Set nproc_per_node to the number of GPUs, or device: cpu.",
    ),
    "SF716": Page(
        "error",
        "the run does not fit into host memory",
        "The least it must hold, from the headers of the model's files: parameters, and with them what is trained. "
        "Activations come on top.",
        "Fewer ranks per machine, zero_stage: 3, tuning: lora, dtype: bfloat16, or more memory.",
        ("hiyouga/LlamaFactory#6755", "deepspeedai/DeepSpeedExamples#498"),
    ),
    "SF717": Page(
        "error",
        "the checkpoints do not fit on the disk",
        "Weights and AdamW's moments in float32, times the checkpoints that are kept and the one that is written.",
        "Lower save_total_limit, set save_steps: 0, or choose another output_dir.",
        ("Sachini/ronin#51",),
    ),
    "SF718": Page(
        "error",
        "the model's files are missing or damaged",
        "There is no such folder; or the header of a safetensors file cannot be read, or its tensors reach beyond its "
        "end.",
        "Fetch or copy the folder again: a download or a copy was cut short.",
    ),
    "SF719": Page(
        "error",
        "the run does not fit into the memory of its GPUs",
        "`surefoot plan` runs the model's own code on tensors without storage and adds what sharding leaves on each "
        "rank; 6 % of a GPU are kept back for what tensors cannot have.",
        "Take one of the settings that `surefoot plan` prints: gradient_checkpointing, a smaller "
        "per_device_train_batch_size, zero_stage: 3, offload: cpu, expert_parallel_size, or more GPUs.",
        ("hpcaitech/ColossalAI#5464", "hiyouga/LLaMA-Factory#3147"),
    ),
    "SF720": Page(
        "warning",
        "settings work against each other",
        "`surefoot import` reads the command line or file as that program would, and adds up what it asks for; "
        "`surefoot doctor` compares what a server is told with the model.",
        "Change the settings that the finding names, there too.",
        ("modelscope/ms-swift#3592", "hiyouga/LLaMA-Factory#1998", "hiyouga/LLaMA-Factory#3147"),
    ),
    "SF721": Page(
        "warning",
        "a rollout server and training want the same memory",
        "A vLLM server that a run starts uses the GPUs that train, unless `vllm_devices` names others, and takes the "
        "share of their memory that --gpu-memory-utilization says: 92 % by default. The model's weights and optimizer "
        "state lie there too, also while the server works.",
        'Give it GPUs of its own (`vllm_devices: "6,7"`) or a smaller share (`vllm_args: [--gpu-memory-utilization, '
        '"0.4"]`); vllm_sleep: true leaves it to training between rollouts.',
        ("huggingface/trl#2688",),
    ),
    "SF722": Page(
        "warning",
        "a GPU has lost data or reported errors",
        "NVML's count of uncorrected errors of its memory since the driver was loaded (in a run: since it began), rows "
        "of memory that could not be replaced, and Xids in the kernel's log.",
        "Reset the GPU where rows wait to be replaced; replace the card if errors come again. `surefoot explain SF112` "
        "says more about Xids.",
        ("NVIDIA/nccl#1488",),
    ),
    "SF723": Page(
        "warning",
        "a GPU is slower than it could be",
        "NVML's reasons for low clocks, its power limit against the one it came with, and its temperature against the "
        "one from which it slows itself down. One slow GPU slows all ranks.",
        "Look at cooling and power supply; `nvidia-smi -pl` sets the limit.",
    ),
    "SF724": Page(
        "warning",
        "NVLink does not work as it should",
        "Links that are down, or went down in a run, or GPUs that the NVSwitches do not know: then CUDA may not start "
        "at all (error 802), or NCCL goes over PCIe.",
        "Start nvidia-fabricmanager in the version of the driver; `nvidia-smi nvlink --status` shows each link.",
        ("NVIDIA/DCGM#304", "NVIDIA/nccl#1488"),
    ),
    "SF725": Page(
        "warning",
        "a GPU's PCIe slot is narrower or slower than the card",
        "Lanes in use against what card and slot can (in a run: against those at its beginning), and the slot's "
        "generation against the card's. The generation in use is looked at by --deep, in the midst of products: it "
        "falls while a card is idle.",
        "Seat the card anew, look at risers and the BIOS's settings.",
    ),
    "SF726": Page(
        "warning",
        "GPUs cannot read each other's memory although they could",
        "NVML's answer for each pair. NCCL then copies through host memory.",
        "Look at ACS and IOMMU (`surefoot explain SF708`) and at the driver's settings; NCCL_P2P_DISABLE=1 avoids "
        "hangs until then.",
        ("NVIDIA/nccl#257", "deepspeedai/DeepSpeed#4433"),
    ),
    "SF727": Page(
        "warning",
        "something else is on the GPUs",
        "Memory in use on the GPUs that the run is to have. A process of an earlier run may have been left behind.",
        "End it (`nvidia-smi` shows it; in a container the host does), or choose others by CUDA_VISIBLE_DEVICES.",
    ),
    "SF728": Page(
        "warning",
        "the machine swaps",
        "Swap is in use and little memory is free: whatever is touched next waits for a disk.",
        "Find what uses the memory (`ps aux --sort=-rss`) before the run begins.",
    ),
    "SF729": Page(
        "warning",
        "few threads may be started",
        "The limit of processes and threads of this user, against 256 for each rank: libraries start a thread for each "
        "CPU, and fail in odd places where they may not.",
        "ulimit -u 65536, in the launcher too.",
    ),
    "SF730": Page(
        "warning",
        "the ranks are not alike",
        "Versions and environment variables of each rank, compared. What differs makes ranks wait for each other for "
        "ever, or fail on one machine only.",
        "Make them the same on all machines: one image, and variables set where the launcher is started.",
        ("NovaSky-AI/SkyRL#143",),
    ),
    "SF731": Page(
        "warning",
        "the clocks of machines differ",
        "Rank 0 was asked for the time; half of the way there and back is what is not known. Timelines of the run "
        "would be out of order.",
        "Let chrony or systemd-timesyncd set the clocks.",
    ),
    "SF732": Page(
        "error",
        "machines do not reach each other",
        "Each machine listened on a free port, and each other one connected to its addresses. gloo and NCCL do the "
        "same when a run starts, and wait.",
        "Open all ports between the machines, or name the interface that connects them (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME). 'timed out' is what a firewall does, 'somebody else answers' a bridge of containers.",
        ("sgl-project/sglang#3794", "huggingface/accelerate#74", "NVIDIA/nccl#286"),
    ),
    "SF733": Page(
        "warning",
        "the network between the ranks is slower than it should be",
        "The bus bandwidth of a large all-reduce against what this way gives where it works; the table and its sources "
        "are in diagnostics/selftest/results.py.",
        "NCCL_DEBUG=INFO shows which way NCCL takes: SHM where P2P should be, NET/Socket where InfiniBand should be, "
        "no GDRDMA.",
        ("NVIDIA/nccl#1412", "NVIDIA/nccl#766"),
    ),
    "SF734": Page(
        "error",
        "data arrive damaged",
        "Ranks sent each other numbers that tell where they come from, and something else arrived.",
        "Look at ACS and IOMMU (`surefoot explain SF708`); NCCL_P2P_DISABLE=1 tells whether it is the way between "
        "GPUs. Do not train before it is found.",
        ("stas00/ml-engineering#1", "NVIDIA/nccl#257"),
    ),
    "SF735": Page(
        "warning",
        "a rank's device is slower than the others'",
        "The same matrix product on all ranks at a time. The slowest rank sets the pace of a step.",
        "Look at its clocks, power limit and temperature (SF723), and at what else runs there.",
    ),
    "SF736": Page(
        "warning",
        "the run's data cannot be handed out",
        "The first data were prepared and read as the run would do it.",
        "See what it says; `surefoot data` shows more.",
    ),
    "SF737": Page(
        "warning",
        "the port of rdzv_endpoint is taken",
        "A program listens on it on this machine. Only the launcher of this run should.",
        "Choose another port, or end what has it: a launcher that was left behind?",
        ("huggingface/accelerate#74",),
    ),
    "SF738": Page(
        "warning",
        "sequences are longer than the model's positions",
        "max_position_embeddings of the model's config.json against the lengths of the run. Beyond them a model has "
        "seen nothing, and some fail.",
        "Lower the lengths, or scale the model's positions (rope_scaling in its config.json).",
    ),
    "SF739": Page(
        "warning",
        "what the run would go on from does not fit it",
        "The newest checkpoint's manifest: its files, and the settings it was written with.",
        "Restore the settings, choose another output_dir, or set overwrite_output_dir: true to begin anew.",
    ),
    "SF740": Page(
        "warning",
        "the chat template does not show what the assistant says",
        "A short conversation was rendered with it, and the assistant's part could not be told from the rest.",
        "Give another template (`chat_template: FILE`).",
        ("huggingface/trl#6668",),
    ),
    "SF741": Page(
        "warning",
        "another NCCL is loaded than was installed",
        "The library in the process's memory, and the version it tells, against the package that torch was built for.",
        "Take the other one out of LD_LIBRARY_PATH or LD_PRELOAD.",
    ),
    "SF742": Page(
        "error",
        "the ranks did not come through the self-test",
        "Each stage has a deadline; the evidence says in which one which ranks failed or said nothing.",
        "Begin with the first rank that is named. Earlier lines of the table say what is wrong with its machine.",
        ("NVIDIA/DCGM#304",),
    ),
    "SF743": Page(
        "error",
        "the run would be refused",
        "What `surefoot train` looks at before it reads weights and data: the device, ranks and experts that do not "
        "divide, the model's files, output_dir.",
        "The cause says what to change.",
        ("hpcaitech/ColossalAI#5426",),
    ),
}
