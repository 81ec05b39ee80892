"""Surefoot's DPO, or its reward models, against TRL's on one machine in one run: speed and memory.

    python benchmarks/pairs_vs_trl.py --method dpo --data gsm8k/train.jsonl

DATA is GSM8K as JSON lines (question, answer), from which pairs of the length of UltraFeedback's are made: several
questions in one, answered in full, and by the answers to others. Both sides take the same pairs in the same order, in
float32 on the CPU, and in turns. Prints a table and writes it, with the machine and versions, under
benchmarks/results/.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from result_table import write_table
from sft_vs_trl import HERE, MODEL, WARMUP_STEPS, collect_rows, make_parser, ours, table, trl

import surefoot
from surefoot.models.resolve_model import resolve_model

PAIRS_OF_MOE = 2
"""With four, TRL needs more than 24 GiB."""
TITLES = {"dpo": "DPO, with the model without its adapter as the reference,", "reward": "A reward model"}
"""Method -> the beginning of the title of its results."""
AT_A_TIME = 2
"""Questions of a pair: with their answers about 300 to 700 tokens."""


def write_pairs(source: Path, target: Path, count: int) -> Path:
    """Write pairs of answers to questions of GSM8K; the rejected answers are those to other questions."""
    with open(source) as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(AT_A_TIME * (count + 1)), strict=False)]
    groups = [rows[begin : begin + AT_A_TIME] for begin in range(0, len(rows), AT_A_TIME)]

    def answer(group: list[dict[str, str]], *, is_long: bool) -> list[dict[str, str]]:
        text = "\n\n".join(row["answer"] for row in group)
        return [{"role": "assistant", "content": f"{text}\n\n{text}" if is_long else text}]

    with open(target, "w") as file:
        for number, (group, other) in enumerate(pairwise(groups)):
            question = "\n\n".join(row["question"] for row in group)
            pair = {
                "prompt": [{"role": "user", "content": question}],
                "chosen": answer(group, is_long=False),
                "rejected": answer(other, is_long=number % 2 == 0),
            }
            file.write(json.dumps(pair) + "\n")
    return target


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    """Every comparison, one after the other, as rows of the table."""
    data, steps = write_pairs(arguments.data, work / "pairs.jsonl", 4 * arguments.steps), arguments.steps
    models = {
        "dense, LoRA all linear layers, four pairs a step": (resolve_model(MODEL), "all", 4),
        f"MoE x8 top-2, LoRA attention + experts, {PAIRS_OF_MOE} pairs a step": (
            surefoot.upcycle(MODEL, work / "moe", num_experts=8, top_k=2),
            "experts",
            PAIRS_OF_MOE,
        ),
    }
    for name, (model, targets, pairs) in models.items():
        changes: dict[str, Any] = {
            "method": arguments.method,
            "max_length": 1024,
            "packing": False,
            "per_device_train_batch_size": pairs,
        }
        rounds = [
            (
                ours(data, model, targets, steps, work / f"{targets}-{number}", **changes),
                trl(
                    arguments.peer,
                    data,
                    model,
                    targets,
                    steps,
                    options=("--method", arguments.method, "--batch", str(pairs)),
                ),
            )
            for number in range(arguments.rounds)
        ]
        yield from table(name, [one for one, _ in rounds], [other for _, other in rounds])


def main() -> None:
    parser = make_parser(__doc__, steps=8)
    parser.add_argument("--method", choices=TITLES, required=True)
    parser.set_defaults(peer=HERE / "trl_pairs.py", rounds=2)
    arguments = parser.parse_args()
    rows = collect_rows(measure, arguments)
    write_table(
        arguments.results,
        f"{arguments.method}-cpu",
        f"{TITLES[arguments.method]} on SmolLM2-135M: Surefoot and TRL + PEFT in one run",
        settings="pairs of GSM8K, LoRA r=8",
        notes=[
            f"{arguments.rounds} rounds in turns of {arguments.steps - WARMUP_STEPS} steps, after {WARMUP_STEPS} of",
            "warm-up: medians, and in brackets the least and the most. Tokens are those of both answers, each with",
            "its question, without padding.",
        ],
        columns=["Surefoot", "TRL", "ratio or difference"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
