"""Checks of what a run asks for against what this machine has. Pure, but for the headers of the model's files."""

from pathlib import Path

from surefoot.doctor.check import Check, Seen, fine, not_applicable, wrong
from surefoot.doctor.sizes import Weights, weights_of
from surefoot.findings import CATALOGUE

GIB = 1 << 30
FP32_BYTES = 4
STATE_BYTES = 12
"""Of a trained parameter besides itself: a gradient and AdamW's two moments, in float32."""
CHECKPOINT_BYTES = 12
"""Of a trained parameter: itself and the two moments."""


def devices(seen: Seen) -> Check:
    name, run, gpus = "devices", seen.run, seen.machine.gpus
    if run is None:
        return fine(name, f"{gpus} GPUs") if gpus else not_applicable(name, "no GPU here, and no run is given")
    visible = seen.machine.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, len([one for one in visible.split(",") if one.strip() not in ("", "-1")]))
    if run.device == "cuda" and not gpus:
        hidden = f" visible (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        return wrong(name, "SF715", f"device=cuda, and this machine has no GPU{hidden}", gpus=0)
    if gpus and run.device != "cpu" and run.nproc_per_node > gpus:
        return wrong(name, "SF715", f"nproc_per_node={run.nproc_per_node}, and {gpus} GPUs are here", gpus=gpus,
                     fix=f"Set nproc_per_node: {gpus}.")  # fmt: skip
    if run.device == "cpu" or not gpus:
        return fine(name, f"{run.nproc_per_node} ranks on the CPU")
    return fine(name, f"{run.nproc_per_node} ranks on {gpus} GPUs")


def host_memory(seen: Seen) -> Check:
    """The least that a run must hold in the memory of this machine, against what is free."""
    name, run = "host memory", seen.run
    if run is None:
        return not_applicable(name, "no run is given")
    is_here = run.device == "cpu" or not seen.machine.gpus
    if not is_here and run.offload is None:
        return not_applicable(name, "what is trained lies on the GPUs")
    weights = _weights(seen)
    if weights is None:
        return not_applicable(name, f"the weights of {run.model} are not in a folder here")
    free = seen.machine.memory_bytes.get("available")
    if free is None:
        return not_applicable(name, seen.machine.unknown.get("memory_bytes", "not known"))
    free = min(free, seen.machine.memory_bytes.get("limit_left", free))
    least, why = _least_bytes(seen, weights)
    said = f"at least {least / GIB:.1f} GiB of {free / GIB:.1f} GiB that are free: {why}"
    if least > free:
        return wrong(name, "SF716", f"this run needs {said}", needed_bytes=least, free_bytes=free, where=_where(seen))
    return fine(name, said)


def _least_bytes(seen: Seen, weights: Weights) -> tuple[int, str]:
    """(what all ranks of this machine must hold between two steps at the least, of what). Activations come on top."""
    run = seen.run
    assert run is not None
    ranks, here = run.nproc_per_node * run.nnodes, run.nproc_per_node
    is_full = run.tuning == "full"
    copies = ranks // run.dp_replicate_size
    parameters = weights.parameters
    if run.offload is not None:  # sharded training state lies in host memory, and nothing else
        state = parameters * (FP32_BYTES + STATE_BYTES) if is_full else 0
        frozen = 0 if is_full or run.zero_stage < 3 else weights.bytes
        return (state + frozen) * here // copies, f"the state of {parameters / 1e9:.2f} G parameters, offloaded"
    each = FP32_BYTES if is_full or run.dtype in ("auto", "float32") else 2
    experts = run.expert_parallel_size if isinstance(run.expert_parallel_size, int) else ranks
    cut = copies if run.zero_stage == 3 else min(experts, copies)  # with shared experts all but them is on each rank
    total = parameters * each * here // cut
    said = f"{parameters / 1e9:.2f} G parameters on {here} ranks"
    if is_full:
        total += parameters * STATE_BYTES * here // (copies if run.zero_stage else 1)
        said += " with their gradients and AdamW's moments"
    return total, said


def checkpoints(seen: Seen) -> Check:
    """What a run will write, against what is free."""
    name, run, disk = "checkpoints", seen.run, seen.machine.output
    if run is None or disk is None:
        return not_applicable(name, "no run is given" if run is None else "output_dir is not known")
    weights = _weights(seen)
    if weights is None:
        return not_applicable(name, f"the weights of {run.model} are not in a folder here")
    if run.tuning != "full":
        return not_applicable(name, "adapters are small")
    kept = (run.save_total_limit or 1) + 1 if run.save_steps else 1  # the newest is written before the oldest goes
    each = weights.parameters * CHECKPOINT_BYTES
    needed = kept * each + weights.bytes
    said = (
        f"{kept} checkpoints of {each / GIB:.1f} GiB and a model of {weights.bytes / GIB:.1f} GiB, "
        f"{disk.free_bytes / GIB:.1f} GiB free at {disk.path}"
    )
    if needed > disk.free_bytes:
        return wrong(
            name,
            "SF717",
            said,
            fix=CATALOGUE["SF717"].fix,
            needed_bytes=needed,
            free_bytes=disk.free_bytes,
            where=_where(seen, "save_total_limit"),
        )
    return fine(name, said)


def _weights(seen: Seen) -> Weights | None:
    assert seen.run is not None
    folder = Path(seen.run.model)
    return weights_of(folder) if folder.is_dir() else None


def _where(seen: Seen, *names: str) -> str:
    assert seen.loaded is not None
    return seen.loaded.where(*(names or ("model",)))


CHECKS = (devices, host_memory, checkpoints)
