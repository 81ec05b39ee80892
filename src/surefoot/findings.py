"""Findings: named causes with their evidence. Standard library only.

A code names one failure mode for ever. The catalogue below is the single place where codes are given out.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Page:
    """What is known of one failure mode, wherever it happens."""

    severity: Severity
    title: str
    evidence: str
    """How it is recognised."""
    fix: str
    cases: tuple[str, ...] = ()
    """Public reports of it."""

    def as_text(self, code: str) -> str:
        """For a person."""
        cases = f"\n\nSeen in: {', '.join(self.cases)}" if self.cases else ""
        return f"{code} {self.title} ({self.severity})\n\nHow we know: {self.evidence}\n\nWhat to do: {self.fix}{cases}"


CATALOGUE: dict[str, Page] = {
    "SF101": Page(
        "error",
        "a rank died",
        "Its process is gone, and it had not said that it is through. The exit status or signal comes from whoever "
        "started it; the last phase and step come from its ring in events/, which survives the kill.",
        "Look at what it printed last. A SIGKILL without a memory limit reached comes from a person, the scheduler, or "
        "a machine that ran out of memory as a whole (dmesg). max_restarts goes on from the newest checkpoint.",
        ("hiyouga/LLaMA-Factory#6755", "QwenLM/Qwen#954"),
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
        ("huggingface/trl#7103",),
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
        "It is in the phase `wait for data` for longer than usual, and the processes that prepare them, if any, are "
        "dead, stopped or idle.",
        "Look at the storage of the data. dataset_num_proc: 1 takes worker processes out of the way.",
        ("huggingface/trl#1519",),
    ),
    "SF108": Page(
        "error",
        "the network does not carry a collective",
        "The Flight Recorders of all ranks show the same collective, asked for and not over; or one rank is in a "
        "collective that another is through with, so what that one sent does not arrive.",
        "The network does not carry it: check the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), firewalls, and "
        "with GPUs peer-to-peer access (NCCL_P2P_DISABLE=1 to compare).",
        ("NVIDIA/nccl#286", "QwenLM/Qwen#970"),
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
        "Ten minutes after the start no rank has written its first event, or ten minutes after the last event of all "
        "ranks the run is still there.",
        "Before the beginning: check that all machines run and reach rdzv_endpoint, and that torch can be imported. "
        "After the end: a thread or process that the run started is waited for.",
        ("huggingface/accelerate#1929", "sgl-project/sglang#3794"),
    ),
    "SF112": Page(
        "error",
        "a GPU reports an error",
        "NVIDIA's driver wrote an Xid into the kernel's log while the run had GPUs open; its number says what it is.",
        "Reset the GPU or restart its machine, and have it looked at if the error comes again. The run goes on "
        "from the newest checkpoint on another machine.",
    ),
    "SF201": Page(
        "error",
        "a rank was killed for memory",
        "It was killed by SIGKILL, and the kernel's count of memory kills in its cgroup has grown since the start.",
        "Lower per_device_train_batch_size or max_length, set gradient_checkpointing: true or zero_stage: 3, or give "
        "the job more memory.",
        ("hiyouga/LLaMA-Factory#6755", "hpcaitech/ColossalAI#5426"),
    ),
    "SF202": Page(
        "warning",
        "memory of the host grows with every step",
        "Anonymous memory (of no file, so no page cache) at the end of steps lies on a line that rises through the "
        "whole window; the phase in which it grows is named. Growth of mapped files is none.",
        "Look at what that phase keeps: lists of tensors with their graphs, caches without limit, metrics as tensors.",
        ("QwenLM/Qwen#954", "deepspeedai/DeepSpeed#3002", "huggingface/transformers#12878"),
    ),
    "SF203": Page(
        "warning",
        "memory of the GPU grows with every step",
        "What CUDA's allocator counts as tensors at the end of steps rises steadily through the whole window; "
        "activations are given back by then.",
        "Look for tensors that are kept with their graphs: losses that are summed without .item() or .detach(), lists "
        "of outputs, hooks.",
        ("deepspeedai/DeepSpeed#3002", "huggingface/transformers#12878"),
    ),
    "SF204": Page(
        "warning",
        "memory of the GPU is cut up",
        "In many of the newest steps CUDA's allocator gave back what it held and asked the driver again "
        "(num_alloc_retries), while much of it lay unused between tensors (inactive_split_bytes).",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use packing: true so that steps have one size.",
    ),
    "SF205": Page(
        "warning",
        "a step needed much more memory than those before it",
        "The peak after that step is a quarter higher than before it, and what is left is less than the difference: "
        "another step like it does not fit.",
        "Lower max_length or per_device_train_batch_size, or use packing: true, with which all steps have one size; "
        "gradient_checkpointing: true makes what depends on the batch smaller.",
    ),
    "SF301": Page(
        "warning",
        "steps have become slower",
        "For as many tokens, the newest steps (at least 20, and 20 seconds) take twice as long as twenty earlier ones "
        "did; the phase that grew most is named. None of the other causes was seen.",
        "Look at what else runs on the machine, at its clocks and temperature, and at what that phase does more.",
        ("QwenLM/Qwen3#275",),
    ),
    "SF302": Page(
        "warning",
        "steps wait for their data",
        "In nearly every step a rank spends a quarter of the time or more in the phase `wait for data`.",
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
        "In nearly every step every rank spends half of the time or more in the phase `communicate`, so none of them "
        "is the cause.",
        "Raise gradient_accumulation_steps or the batch, use fewer ranks or a lower zero_stage, and check that the "
        "fast network interface is used.",
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
        "optimizer for 70 % and more, and the rank's process uses about one core or more: many small kernels.",
        "Raise per_device_train_batch_size or max_length, set torch_compile: true; in other trainers use fused experts "
        "in place of a loop over them (SF310 is what a loop over 60 experts looks like).",
        ("QwenLM/Qwen3#275", "deepseek-ai/DeepSeek-MoE#5"),
    ),
    "SF401": Page(
        "error",
        "the loss is not finite",
        "The loss of a step is NaN or infinite on some rank; the weights were not updated with it.",
        "Large weights mean that steps were too large: lower learning_rate or max_grad_norm, or add warmup_steps. Else "
        "look at the row that is named. Resume from the last good checkpoint, if there is one.",
        ("modelscope/ms-swift#1099",),
    ),
    "SF402": Page(
        "error",
        "a gradient is not finite",
        "The loss is finite, the gradient of the named parameters is not; the weights were not updated with it.",
        "Lower learning_rate or max_grad_norm; resume from the last good checkpoint.",
    ),
    "SF403": Page(
        "warning",
        "the loss has jumped and stays up",
        "Five steps in a row lie above each of the thirty before them, half of them by a factor of 1.5 and half a nat, "
        "and gradients were three times as large as usual when it happened: the steps are too large for them.",
        "Resume from a checkpoint before the jump with a lower learning_rate, more warmup_steps or a lower "
        "max_grad_norm, and look at the rows of that step.",
        ("modelscope/ms-swift#1099",),
    ),
    "SF404": Page(
        "warning",
        "a router sends nearly all tokens to the same experts",
        "Over fifty steps of a run that trains its routers, as many experts of a layer as a token chooses got nearly "
        "all of its rows.",
        "Set router_aux_loss_coef (0.001 to 0.01), or leave `router` out of target_modules.",
    ),
    "SF405": Page(
        "info",
        "experts that get no token any more",
        "Over fifty steps of a run that trains its routers they got none, and before they had half of an even part "
        "or more; each would have got hundreds if all were used evenly.",
        "Set router_aux_loss_coef, or leave `router` out of target_modules.",
        ("hpcaitech/ColossalAI#5426",),
    ),
    "SF406": Page(
        "warning",
        "gradients grow with the learning rate",
        "Over blocks of ten steps the norm of the gradients has only grown, to five times its lowest, while the "
        "learning rate rose and the loss rose by more than its noise.",
        "Lower learning_rate, or lengthen warmup_steps; the loss jumps next, as a rule.",
    ),
    "SF501": Page(
        "error",
        "no token of any sample is trained",
        "Every label of the data is masked.",
        "`surefoot data run.yaml` shows what is trained; check train_on, roles and the chat template.",
        ("huggingface/trl#6668",),
    ),
    "SF502": Page(
        "warning",
        "two end-of-turn tokens",
        "A rendered turn ends with two of them.",
        "The data hold one already: take it out of the texts.",
    ),
    "SF503": Page(
        "warning",
        "two beginning-of-sequence tokens",
        "A rendered sample begins with two of them.",
        "The template writes one and the data hold one: take it out of the texts.",
    ),
    "SF504": Page(
        "warning",
        "the answer stands in the prompt",
        "The words that are trained are also in the turn before.",
        "Check the columns: an answer was probably mapped to the prompt as well.",
    ),
    "SF505": Page(
        "error",
        "the tokenizer does not belong to the model",
        "Ids of the data are outside the model's embedding.",
        "Use the model's own tokenizer.",
    ),
    "SF506": Page(
        "warning",
        "many rows are truncated",
        "More than 5 % of the rows are longer than max_length.",
        "Raise max_length, or drop these rows with truncation: drop.",
    ),
    "SF507": Page(
        "warning",
        "held-out samples are also trained on",
        "Rendered samples of the evaluation data are equal to trained ones.",
        "Remove them from one of the two.",
    ),
    "SF508": Page(
        "info",
        "texts of the data look like special tokens",
        "A text holds the name of a special token; it is tokenised as plain text.",
        "Nothing, unless they are meant as control tokens: then write the conversation as messages.",
    ),
    "SF509": Page(
        "warning",
        "reasoning is not shown by the chat template",
        "Rows carry reasoning, and the template renders nothing of it.",
        "Use a template that shows it, or drop the column.",
    ),
    "SF601": Page(
        "warning",
        "a damaged checkpoint was passed over",
        "A file of it is missing or does not match the checksum in its manifest; an older one is used.",
        "Check the disk if this happens again.",
    ),
    "SF701": Page(
        "warning",
        "too little shared memory",
        "NCCL passes data between the GPUs of one machine through /dev/shm; Docker's default of 64 MiB is too little.",
        "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
        ("pytorch/torchtitan#853", "NVIDIA/nccl#342"),
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
        "Other machines are told to come to the address of the host's name, which is one of the loopback interface.",
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
        "that is routed, or a variable that switches it off.",
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
        "From a table of what each needs and what is known to be broken, with its sources in doctor/environment.py.",
        "Update the driver or the kernel, or install a torch that was built for this driver.",
        ("hiyouga/LlamaFactory#2672", "Lightning-AI/pytorch-lightning#19425", "huggingface/accelerate#1929"),
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
        "more threads than CPUs",
        "What the ranks start, against the affinity and the quota of this process.",
        "Set OMP_NUM_THREADS to the CPUs per rank.",
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
        "the model's files are damaged",
        "The header of a safetensors file cannot be read, or its tensors reach beyond its end.",
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
        "settings of another program work against each other",
        "`surefoot import` reads the command line or file as that program would, and adds up what it asks for.",
        "Change the settings that the finding names, there too.",
        ("modelscope/ms-swift#3592", "hiyouga/LLaMA-Factory#1998"),
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
        "NVML's count of uncorrected errors of its memory since the driver was loaded, rows of memory that could not "
        "be replaced, and Xids in the kernel's log.",
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
        "Links that are down, or GPUs that the NVSwitches do not know: then CUDA may not start at all (error 802), or "
        "NCCL goes over PCIe.",
        "Start nvidia-fabricmanager in the version of the driver; `nvidia-smi nvlink --status` shows each link.",
        ("NVIDIA/nccl#1488",),
    ),
    "SF725": Page(
        "warning",
        "a GPU's PCIe slot is narrower or slower than the card",
        "Lanes in use against what card and slot can, and the slot's generation against the card's. (The generation in "
        "use says nothing: it falls while a card is idle.)",
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
        ("huggingface/accelerate#74", "NVIDIA/nccl#286"),
    ),
    "SF733": Page(
        "warning",
        "the network between the ranks is slower than it should be",
        "The bus bandwidth of a large all-reduce against what this way gives where it works; the table and its sources "
        "are in self_test/verdict.py.",
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
        ("NVIDIA/nccl#257",),
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
    ),
    "SF801": Page(
        "error",
        "the rollout engine does not answer",
        "A request to the server was not answered by its deadline (`rollout_timeout_s`), was refused, or the server's "
        "process ended. The evidence holds the end of the server's log and what became of its process.",
        "Read the end of its log. Out of memory: lower the engine's share (`vllm_args: "
        '[--gpu-memory-utilization, "0.5"]`) or its --max-model-len. Only slow: raise rollout_timeout_s.',
        ("modelscope/ms-swift#3592",),
    ),
    "SF802": Page(
        "warning",
        "reward functions fail",
        "A function raised, took longer than `reward_timeout_s`, returned NaN or another number of rewards than it was "
        "given completions, or its process ended. It was asked again for each completion alone; those on which it "
        "failed again are left out of the loss. metrics.jsonl counts them as `rewards_failed`, completions.jsonl "
        "gives the reason of each.",
        "Correct the function where the finding's trace points; let it return None for completions that it cannot "
        "judge. Raise reward_timeout_s where it only is slow.",
    ),
    "SF803": Page(
        "error",
        "no completion has a reward",
        "In one step every reward function failed on, or returned None for, every completion.",
        "Correct the functions where the finding's trace points; compare the names of their arguments with the "
        "columns of the data.",
    ),
    "SF804": Page(
        "warning",
        "rewards do not tell completions apart",
        "In ten rollouts in a row all completions of each prompt had the same reward, so every advantage was 0.",
        "All 0: the task is too hard for the model as it is. Warm up with SFT, or reward parts of an answer (its "
        "format, for one). All at the top: the task is learned, or the reward is too easy. dynamic_sampling replaces "
        "such groups; a higher temperature makes completions differ.",
    ),
    "SF805": Page(
        "error",
        "the rollout engine does not have the policy's weights",
        "With each sync an adapter's file is read back and compared tensor by tensor, and one sequence is scored by "
        "the server and by the trainer: tensors are missing or changed, or the logprobs disagree.",
        "Compare the base model, its type and chat template on both sides. A server that merges adapters, or does not "
        "adapt all modules of target_modules (experts, in some versions), gives other numbers: train the modules that "
        "it can serve, or set rollout_engine: local.",
        ("verl-project/verl#7495", "OpenRLHF/OpenRLHF#1349", "huggingface/trl#6688"),
    ),
    "SF806": Page(
        "error",
        "the rollout engine answered something else",
        "A completion was of another model than the one asked for, had fewer tokens than its end says, or had no "
        "logprob for each token; or its prompt with images was read as other tokens.",
        "Use the version of vLLM that the documentation names; look for a proxy between that changes requests.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One named cause.

    `evidence` holds the recorded values the conclusion rests on, `confidence` is 0 to 1, `fix` is what to do.
    """

    code: str
    cause: str
    evidence: dict[str, Any]
    fix: str
    confidence: float = 1.0

    @property
    def severity(self) -> Severity:
        return CATALOGUE[self.code].severity

    @property
    def title(self) -> str:
        return CATALOGUE[self.code].title

    def as_text(self) -> str:
        """The finding as a person reads it, over several lines."""
        evidence = "\n".join(f"    {name}: {value}" for name, value in self.evidence.items())
        return f"{self.code} {self.title}\n  cause: {self.cause}\n  evidence:\n{evidence}\n  fix: {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        """The finding as written to `findings.jsonl`."""
        return {"severity": self.severity, "title": self.title, **asdict(self)}
