"""Surefoot's distillation against TRL's GKD on one machine in one run: speed and memory.

    python benchmarks/distill_vs_trl.py --data gsm8k/train.jsonl

DATA is GSM8K as JSON lines (question, answer). The teacher is a dense model of its own, in the same process. Both sides
take the same rows in the same order, in float32 on the CPU, and in turns; no step trains on completions. Prints a table
and writes it, with the machine and versions, under benchmarks/results/.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from result_table import write_table
from sft_vs_trl import HERE, MODEL, WARMUP_STEPS, collect_rows, make_parser, ours, table, trl

import surefoot
from surefoot.models.resolve_model import resolve_model


def write_rows(source: Path, target: Path, count: int) -> Path:
    """Write rows of GSM8K as conversations."""
    with open(source) as lines, open(target, "w") as file:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return target


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    """Every comparison, one after the other, as rows of the table."""
    data, steps = write_rows(arguments.data, work / "rows.jsonl", 4 * arguments.steps), arguments.steps
    dense = resolve_model(MODEL)
    teacher = shutil.copytree(dense, work / "teacher")  # of its own, and not the student without its adapter
    models = {
        "dense, LoRA all linear layers": (dense, "all"),
        "MoE x8 top-2, LoRA attention + experts": (
            surefoot.upcycle(MODEL, work / "moe", num_experts=8, top_k=2),
            "experts",
        ),
    }
    for name, (model, targets) in models.items():
        rounds = [
            (
                ours(
                    data, model, targets, steps, work / f"{targets}-{number}",
                    method="distill", teacher_model=str(teacher), beta=0.5,
                ),
                trl(arguments.peer, data, model, targets, steps, options=("--teacher", str(teacher))),
            )
            for number in range(arguments.rounds)
        ]  # fmt: skip
        yield from table(name, [one for one, _ in rounds], [other for _, other in rounds])


def main() -> None:
    parser = make_parser(__doc__, steps=8)
    parser.set_defaults(peer=HERE / "trl_distill.py", rounds=2)
    arguments = parser.parse_args()
    rows = collect_rows(measure, arguments)
    write_table(
        arguments.results,
        "distill-cpu",
        "Distillation on SmolLM2-135M: Surefoot and TRL's GKD + PEFT in one run",
        settings="GSM8K, batch 4, LoRA r=8, beta 0.5, a teacher of its own",
        notes=[
            f"{arguments.rounds} rounds in turns of {arguments.steps - WARMUP_STEPS} steps, after {WARMUP_STEPS} of",
            "warm-up: medians, and in brackets the least and the most. Tokens are those of the rows, without padding.",
        ],
        columns=["Surefoot", "TRL", "ratio or difference"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
