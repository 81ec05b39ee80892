"""Catalogue pages for problems that are found before a run starts (SF7..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF701": Page(
        "too little shared memory",
        "NCCL passes data between the GPUs of one machine through /dev/shm; Docker's default of 64 MiB is too little.",
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
        ("pytorch/torchtitan#853", "NVIDIA/nccl#342", "huggingface/accelerate#1929"),
    ),
    "SF702": Page(
        "too little memory may be locked",
        "InfiniBand and RoCE need buffers that the kernel may not move; the limit of this process is below 1 GiB.",
        "ulimit -l unlimited, in the launcher too: LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 in Docker.",
        ("NVIDIA/nccl-tests#206",),
    ),
    "SF703": Page(
        "few files may be open",
        "The limit of this process is below 1024.",
        "ulimit -n 65536, in the launcher too.",
        ("pytorch/pytorch#973",),
    ),
    "SF704": Page(
        "the name of this machine leads back to itself",
        "Other machines would connect to the address of its host name, or of rdzv_endpoint, and that address is on the "
        "loopback interface.",
        "In /etc/hosts, replace the loopback address of its name by the machine's own address, or set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        ("ray-project/ray#37461", "meta-pytorch/data#1142"),
        severity="error",
    ),
    "SF705": Page(
        "no usable network interface is named",
        "A variable names an interface that this machine does not have or that is down, or does not exclude the "
        "loopback interface.",
        "Set it to an interface that `ip addr` shows with an address of the network between the machines, or unset it.",
        ("horovod/horovod#700", "NVIDIA/nccl#286", "QwenLM/Qwen#970"),
        severity="error",
    ),
    "SF706": Page(
        "InfiniBand is not used as it could be",
        "Ports and GIDs under /sys/class/infiniband: a port is not active, a GID index has no address that is routed, "
        "or a variable switches InfiniBand off or names no adapter of this machine.",
        "Look at `ibstat` and `show_gids`. On RoCE set NCCL_IB_GID_INDEX to a RoCE v2 GID with an IP address, or unset "
        "it: NCCL finds one since 2.21.",
        ("NVIDIA/nccl#426", "pytorch/pytorch#81628"),
    ),
    "SF707": Page(
        "network cards cannot read GPU memory",
        "The machine has both, but the kernel module that connects them is not loaded. Newer drivers can work without "
        "it (DMA-BUF); NCCL_DEBUG=INFO then shows GDRDMA.",
        "modprobe nvidia-peermem, on every machine.",
        ("NVIDIA/nccl#897",),
    ),
    "SF708": Page(
        "the IOMMU is between the GPUs",
        "It is on, and not in pass-through mode: peer-to-peer copies may hang, or be slower than through host memory.",
        "Boot with iommu=pt (or intel_iommu=off, amd_iommu=off) and disable ACS on the PCIe switches; "
        "NCCL_P2P_DISABLE=1 to compare.",
        ("NVIDIA/nccl#257", "stas00/ml-engineering#1"),
    ),
    "SF709": Page(
        "versions that do not work together",
        "A table of requirements and known defects, with sources in known_issues.py and versions.py of "
        "diagnostics/preflight.",
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
        "an environment variable that does not help",
        "Its name is nearly one that NCCL knows, or it is for debugging and makes every run slow.",
        "Correct or unset it, on all machines alike.",
        ("QwenLM/Qwen#970",),
    ),
    "SF711": Page(
        "output_dir cannot take what a run writes",
        "Writing, syncing, renaming or deleting a small file there failed, or the file system has no room for more "
        "files.",
        "Choose another output_dir, or repair the file system.",
        ("awslabs/awsome-distributed-ai#1225",),
        severity="error",
    ),
    "SF712": Page(
        "the host of rdzv_endpoint is not known here",
        "Its name has no address on this machine, or the name server does not respond.",
        "Use a name or address that all machines know. A service of Kubernetes may need a moment to be published.",
    ),
    "SF713": Page(
        "small packets on a fast network",
        "RoCE runs over an interface with an MTU below 4200 bytes; a message of the card holds 4096.",
        "ip link set dev INTERFACE mtu 9000, on the switches and all machines.",
        ("NVIDIA/nccl#1957",),
    ),
    "SF714": Page(
        "more ranks or threads than CPUs",
        "The processes and threads that the ranks start exceed the CPU affinity or quota of this process.",
        "Give the run more cores (taskset, --cpus-per-task, limits of the container), start fewer ranks, or set "
        "OMP_NUM_THREADS to the CPUs per rank.",
    ),
    "SF715": Page(
        "this machine has too few GPUs for the run",
        "The GPUs under /proc/driver/nvidia, without those that CUDA_VISIBLE_DEVICES hides.",
        "Set nproc_per_node to the number of GPUs, or device: cpu.",
    ),
    "SF716": Page(
        "the run does not fit into host memory",
        "The least that it needs, from the headers of the model's files: the parameters, and gradients and optimizer "
        "state of those that are trained. Activations come on top.",
        "Fewer ranks per machine, zero_stage: 3, tuning: lora, dtype: bfloat16, or more memory.",
        ("hiyouga/LlamaFactory#6755", "deepspeedai/DeepSpeedExamples#498"),
        severity="error",
    ),
    "SF717": Page(
        "the checkpoints do not fit on the disk",
        "The size of the weights and of AdamW's moments in float32, times the checkpoints that are kept plus the one "
        "being written.",
        "Lower save_total_limit, set save_steps: 0, or choose another output_dir.",
        ("Sachini/ronin#51",),
        severity="error",
    ),
    "SF718": Page(
        "the model's files are missing or damaged",
        "The folder does not exist, the header of a safetensors file is unreadable, or its tensors reach beyond its "
        "end.",
        "Download or copy the folder again, as the model was released.",
        severity="error",
    ),
    "SF719": Page(
        "the run does not fit into the memory of its GPUs",
        "`surefoot plan` runs the model's own code on tensors without storage and adds what sharding leaves on each "
        "rank; 6 % of a GPU are reserved for memory that tensors cannot use.",
        "Use one of the settings that `surefoot plan` prints: gradient_checkpointing, a smaller "
        "per_device_train_batch_size, zero_stage: 3, offload: cpu, expert_parallel_size, quantization: nf4, or more "
        "GPUs.",
        ("hpcaitech/ColossalAI#5464", "hiyouga/LLaMA-Factory#3147"),
        severity="error",
    ),
    "SF720": Page(
        "settings work against each other",
        "`surefoot import` reads the command line or file as that program would and compares its settings; `surefoot "
        "doctor` compares a server's options with the model.",
        "Change the settings that the finding names, in the other program too.",
        ("modelscope/ms-swift#3592", "hiyouga/LLaMA-Factory#1998", "hiyouga/LLaMA-Factory#3147"),
    ),
    "SF721": Page(
        "a rollout server and training want the same memory",
        "A vLLM server that a run starts uses the GPUs that train, unless `vllm_devices` names others, and takes the "
        "share --gpu-memory-utilization of their memory (92 % by default). The weights and the optimizer state of "
        "training stay there while the server works.",
        'Give the server GPUs of its own (`vllm_devices: "6,7"`) or a smaller share (`vllm_args: '
        '[--gpu-memory-utilization, "0.4"]`); with vllm_sleep: true it frees the memory between rollouts.',
        ("huggingface/trl#2688",),
    ),
    "SF722": Page(
        "a GPU has lost data or reported errors",
        "NVML's count of uncorrected memory errors since the driver was loaded (in a run: since it began), memory rows "
        "that could not be replaced, and Xids in the kernel log.",
        "Reset the GPU if rows wait to be replaced; replace the card if errors come again. `surefoot explain SF112` "
        "says more about Xids.",
        ("NVIDIA/nccl#1488",),
    ),
    "SF723": Page(
        "a GPU is slower than it could be",
        "NVML's reasons for low clocks, its power limit against its default, and its temperature against the one at "
        "which it slows itself down. One slow GPU slows all ranks.",
        "Check cooling and power supply; `nvidia-smi -pl` sets the limit.",
    ),
    "SF724": Page(
        "NVLink does not work as it should",
        "Links are down, or went down in a run, or the NVSwitches do not know the GPUs. CUDA may then not start at all "
        "(error 802), or NCCL uses PCIe.",
        "Start nvidia-fabricmanager in the version of the driver; `nvidia-smi nvlink --status` shows each link.",
        ("NVIDIA/DCGM#304", "NVIDIA/nccl#1488"),
    ),
    "SF725": Page(
        "a GPU's PCIe slot is narrower or slower than the card",
        "Lanes in use against those that card and slot have (in a run: against those at its beginning), and the slot's "
        "generation against the card's. The generation in use falls while a card is idle, so --deep reads it during "
        "matrix products.",
        "Reseat the card, and check risers and the BIOS settings.",
    ),
    "SF726": Page(
        "GPUs cannot read each other's memory although they could",
        "NVML's response for each pair. NCCL then copies through host memory.",
        "Check ACS and the IOMMU (`surefoot explain SF708`) and the driver's settings; until then NCCL_P2P_DISABLE=1 "
        "avoids hangs.",
        ("NVIDIA/nccl#257", "deepspeedai/DeepSpeed#4433"),
    ),
    "SF727": Page(
        "other processes use the GPUs",
        "Memory of the GPUs that the run is to use is taken, perhaps by a process that an earlier run left behind.",
        "End that process (`nvidia-smi` shows it; in a container the host does), or choose other GPUs with "
        "CUDA_VISIBLE_DEVICES.",
    ),
    "SF728": Page(
        "the machine swaps",
        "Swap is in use and little memory is free: the run would wait for the disk.",
        "Find what uses the memory (`ps aux --sort=-rss`) before the run begins.",
    ),
    "SF729": Page(
        "few threads may be started",
        "The limit of processes and threads of this user, against 256 for each rank: libraries start a thread for each "
        "CPU, and fail in unexpected places if they cannot.",
        "ulimit -u 65536, in the launcher too.",
    ),
    "SF730": Page(
        "the ranks are not alike",
        "Versions or environment variables of the ranks differ. Ranks may then wait for each other for ever, or fail "
        "on one machine only.",
        "Make them the same on all machines: use one image, and set variables where the launcher is started.",
        ("NovaSky-AI/SkyRL#143",),
    ),
    "SF731": Page(
        "the clocks of machines differ",
        "Rank 0 was asked for its time; half of the round trip is the uncertainty. Timelines of the run would be out "
        "of order.",
        "Let chrony or systemd-timesyncd set the clocks.",
    ),
    "SF732": Page(
        "machines do not reach each other",
        "Each machine listened on a free port, and the others tried to connect to its addresses, as gloo and NCCL do "
        "when a run starts.",
        "Open all ports between the machines, or name the interface that connects them (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME). 'timed out' points to a firewall, 'somebody else answers' to a bridge of containers.",
        ("sgl-project/sglang#3794", "huggingface/accelerate#74", "NVIDIA/nccl#286"),
        severity="error",
    ),
    "SF733": Page(
        "the network between the ranks is slower than it should be",
        "The bus bandwidth of a large all-reduce against the usual one of this kind of connection; the table and its "
        "sources are in diagnostics/selftest/results.py.",
        "NCCL_DEBUG=INFO shows which transport NCCL uses: SHM instead of P2P, NET/Socket instead of InfiniBand, or no "
        "GDRDMA.",
        ("NVIDIA/nccl#1412", "NVIDIA/nccl#766"),
    ),
    "SF734": Page(
        "data arrive damaged",
        "Ranks sent each other numbers that identify their sender, and received other numbers.",
        "Check ACS and the IOMMU (`surefoot explain SF708`); NCCL_P2P_DISABLE=1 shows whether copies between GPUs are "
        "the reason. Do not train before it is found.",
        ("stas00/ml-engineering#1", "NVIDIA/nccl#257"),
        severity="error",
    ),
    "SF735": Page(
        "a rank's device is slower than the others'",
        "The same matrix product was timed on all ranks together. The slowest rank sets the pace of a step.",
        "Check its clocks, power limit and temperature (SF723), and what else runs on it.",
    ),
    "SF736": Page(
        "the run's data cannot be prepared",
        "The first rows were prepared and read as the run would do it.",
        "The cause says what failed; `surefoot data` shows more.",
    ),
    "SF737": Page(
        "the port of rdzv_endpoint is taken",
        "A program other than the launcher of this run listens on it on this machine.",
        "Choose another port, or end that program, perhaps a launcher of an earlier run.",
        ("huggingface/accelerate#74",),
    ),
    "SF738": Page(
        "sequences are longer than the model's positions",
        "The lengths of the run exceed max_position_embeddings in the model's config.json. The model was not trained "
        "on positions beyond it, and some models fail there.",
        "Lower the lengths, or scale the positions of a model with RoPE (rope_scaling in its config.json).",
    ),
    "SF739": Page(
        "the newest checkpoint does not fit the run",
        "A file of the checkpoint is missing or damaged, or it was written with other settings.",
        "Restore the settings, choose another output_dir, or set overwrite_output_dir: true to begin anew.",
    ),
    "SF740": Page(
        "the chat template does not show what the assistant says",
        "In a short conversation that it rendered, the assistant's part cannot be told from the rest.",
        "Set another template (`chat_template: FILE`).",
        ("huggingface/trl#6668",),
    ),
    "SF741": Page(
        "another NCCL is loaded than was installed",
        "The version of the library in the process's memory differs from the package that torch was built for.",
        "Remove the other one from LD_LIBRARY_PATH or LD_PRELOAD.",
    ),
    "SF742": Page(
        "the ranks did not pass the self-test",
        "Ranks failed in a stage, or did not finish it by its deadline; the evidence names the stage and the ranks.",
        "Begin with the first rank that is named. Earlier lines of the table say what is wrong with its machine.",
        ("NVIDIA/DCGM#304",),
        severity="error",
    ),
    "SF743": Page(
        "the run would be refused",
        "What `surefoot train` checks before it reads weights and data: the device, ranks and experts that do not "
        "divide, the model's files, output_dir.",
        "Change the setting or the file that the cause names, then start again.",
        ("hpcaitech/ColossalAI#5426",),
        severity="error",
    ),
    "SF744": Page(
        "the learning rate is far from what is usual",
        "It is more than ten times the highest, or less than a hundredth of the lowest learning rate that published "
        "recipes have for LoRA or full fine-tuning of a model of this size.",
        "Take a rate of the range that is named, unless you are trying what happens beyond it.",
        severity="info",
    ),
    "SF745": Page(
        "the address space is limited",
        "The limit of addresses of a process (RLIMIT_AS, `ulimit -v`) is below what a rank maps: on the CPU 8 GiB "
        "beside its model, on a GPU as much as the memory of the machine and its GPUs. Memory is then refused although "
        "it is free, by CUDA at its start, or by the allocator in a step.",
        "Remove the limit (ulimit -v unlimited). To limit memory, use a cgroup: the memory of a job or a container.",
    ),
    "SF746": Page(
        "the driver of the GPUs is slow, or does not answer",
        "NVML did not describe the GPUs within 8 seconds, or took more than four.",
        "Turn persistence mode on (nvidia-smi -pm 1, or nvidia-persistenced): without it the driver starts anew for "
        "each process. If `nvidia-smi` hangs, read the kernel log for Xid, and reset the GPU or restart the machine.",
        ("NVIDIA/DCGM#303",),
    ),
    "SF747": Page(
        "rows would be left out",
        "One of the first 200 rows of a file cannot be trained on, and on_bad_row is skip.",
        "Correct the rows, unless they are meant to be left out. `surefoot data` lists all of them.",
    ),
    "SF748": Page(
        "bfloat16 is very slow on this CPU",
        "The run computes in bfloat16 on processors without AVX-512, AMX or ARM's bf16 instructions. torch then "
        "multiplies matrices without its fast library: on an AVX2 processor a product of 1024 x 576 with 576 x 1536 "
        "and its gradient took 28 times as long as in float32.",
        "Leave dtype out (float32 on the CPU, bfloat16 on a GPU), or set dtype: float32.",
    ),
}
