"""GRPO by Surefoot and by TRL's GRPOTrainer on one machine in one run: completions a second, and the rewards.

    python benchmarks/grpo_vs_trl.py --peer trl_grpo.py

PEER is a script that trains on sums with TRL and prints one JSON line. Both sides train LoRA on all linear layers of a
model that was warmed up on sums, in float32 on the CPU, on the same rows, with TRL's own way of generating and
Surefoot's local engine; seed after seed. Prints a table and writes it, with the machine and versions, under
benchmarks/results/.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_table import write_table
from sft_vs_trl import run

import surefoot

HERE = Path(__file__).parent
BESIDE = HERE.parent.parent / "shared"
MOST_TOKENS = 16
LAST_STEPS = 5
WARMUP_STEPS = 1
REWARD = """
import re

def first_number(completions, answer, **_):
    found = [re.findall(r"-?\\d+", completion[0]["content"])[:1] for completion in completions]
    return [float(one == [right]) for one, right in zip(found, answer)]
"""


def question(one: int, other: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {one} + {other}? Answer with the number only."}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def warmed_up(work: Path) -> Path:
    """A model that answers with a number, right now and then."""
    rng = random.Random(1)
    pairs = [(rng.randint(1, 20), rng.randint(1, 20)) for _ in range(192)]
    rows = [{"messages": [*question(*pair), {"role": "assistant", "content": str(sum(pair))}]} for pair in pairs]
    example = HERE.parent / "examples" / "grpo-warmup.yaml"
    data = write_rows(work / "warmup.jsonl", rows)
    made = surefoot.train(example, dataset=data, output_dir=work / "warmup", screen=False)
    surefoot.export(made.run_folder, work / "model", merge=True)
    return work / "model"


def ours(model: Path, seed: int, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    random.seed(seed)
    rows = []
    for _ in range(200):
        pair = random.randint(1, 20), random.randint(1, 20)
        rows.append({"prompt": question(*pair), "answer": str(sum(pair))})
    (work / "reward.py").write_text(REWARD)
    config = {
        "model": str(model),
        "method": "grpo",
        "dataset": str(write_rows(work / f"rows-{seed}.jsonl", rows)),
        "output_dir": str(work / f"run-{seed}"),
        "reward_funcs": [f"{work}/reward.py:first_number"],
        "num_generations": arguments.generations,
        "global_batch_size": arguments.batch,
        "per_device_train_batch_size": arguments.batch,
        "max_completion_length": MOST_TOKENS,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "max_steps": arguments.steps,
        "save_steps": 0,
        "seed": seed,
        "device": "cpu",
    }
    path = work / f"run-{seed}.json"  # JSON is YAML
    path.write_text(json.dumps(config))
    summary = json.loads(run("-m", "surefoot", "train", str(path), "--json"))
    lines = [json.loads(line) for line in (work / f"run-{seed}" / "metrics.jsonl").read_text().splitlines()]
    median = statistics.median([line["step_time_s"] for line in lines[WARMUP_STEPS:]])
    return {
        "step_time_s": median,
        "completions_per_second": arguments.batch / median,
        "reward": [line["reward"] for line in lines],
        "peak_memory_bytes": summary["peak_memory_bytes"],
    }


def trl(model: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    options = {
        "--model": model,
        "--steps": arguments.steps,
        "--batch": arguments.batch,
        "--generations": arguments.generations,
        "--max-completion-length": MOST_TOKENS,
        "--seed": seed,
    }
    said = run(str(arguments.peer), *(str(part) for pair in options.items() for part in pair))
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def table(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    rows = []
    for seed, (mine, theirs) in enumerate(pairs):
        speed = mine["completions_per_second"] / theirs["completions_per_second"]
        rows.append(
            f"| seed {seed}: completions/s | {mine['completions_per_second']:.2f} | "
            f"{theirs['completions_per_second']:.2f} | {speed:.2f} x |"
        )
        last, their_last = (statistics.mean(one["reward"][-LAST_STEPS:]) for one in (mine, theirs))
        first, their_first = (statistics.mean(one["reward"][:LAST_STEPS]) for one in (mine, theirs))
        rows.append(
            f"| seed {seed}: mean reward of the first and the last {LAST_STEPS} steps | {first:.2f}, {last:.2f} | "
            f"{their_first:.2f}, {their_last:.2f} | {last - their_last:+.2f} at the end |"
        )
    each = [[statistics.mean(one["reward"][-LAST_STEPS:]) for one in side] for side in zip(*pairs, strict=True)]
    if len(pairs) > 1:
        means, noise = [statistics.mean(one) for one in each], [statistics.stdev(one) for one in each]
        rows.append(
            f"| last rewards, mean and deviation over seeds | {means[0]:.2f}, {noise[0]:.2f} | {means[1]:.2f}, "
            f"{noise[1]:.2f} | {means[0] - means[1]:+.2f} |"
        )
    memory = [max(one["peak_memory_bytes"] for one in side) / 2**30 for side in zip(*pairs, strict=True)]
    rows.append(f"| peak RSS, GiB | {memory[0]:.2f} | {memory[1]:.2f} | {memory[0] / memory[1]:.2f} x |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer", type=Path, default=BESIDE / "peers" / "trl_grpo.py")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    if not arguments.peer.is_file():
        sys.exit(f"{arguments.peer} does not exist; give --peer (see --help)")
    work = Path(tempfile.mkdtemp(prefix="surefoot-bench-"))
    try:
        model = warmed_up(work)
        pairs = []
        for seed in range(arguments.seeds):
            pairs.append((ours(model, seed, arguments, work), trl(model, seed, arguments)))
            print("\n".join(table(pairs[-1:])), flush=True)
    finally:
        shutil.rmtree(work)

    write_table(
        arguments.results,
        "grpo-cpu",
        "GRPO on SmolLM2-135M, warmed up on sums: Surefoot and TRL in one run",
        settings=f"LoRA r=8 on all linear layers, {arguments.batch} completions a step in groups of "
        f"{arguments.generations}, at most {MOST_TOKENS} tokens each",
        notes=[
            f"Medians of {arguments.steps - WARMUP_STEPS} steps after {WARMUP_STEPS} of warm-up. The seed draws rows, "
            "their order and the tokens; the two draw in different ways.",
        ],
        columns=["Surefoot, local engine", "TRL, its own generation", "ratio or difference"],
        rows=table(pairs),
    )


if __name__ == "__main__":
    main()
