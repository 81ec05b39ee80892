"""Frozen weights in NF4 against those in float32, and against TRL + PEFT + bitsandbytes, on one machine in one run.

    python benchmarks/nf4_vs_float.py --peer trl_sft.py --data gsm8k/train.jsonl

PEER and DATA are those of sft_vs_trl.py. The runs take turns. Prints a table and writes it under benchmarks/results/.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_table import write_table
from sft_vs_trl import HERE, MODEL, as_pairs, collect_rows, make_parser, ours, run, table

import surefoot
from surefoot.diagnostics.monitor.event_log import read_history
from surefoot.models.resolve_model import resolve_model

NF4: dict[str, Any] = {"quantization": "nf4"}
BFLOAT16_BYTES = 2
LAST_LOSSES = 20
"""Steps at the end over which losses are averaged."""


def count_frozen_bytes(folder: Path) -> int:
    (entry,) = (entry.values for entry in read_history(folder).entries if entry.kind == "memory")
    return int(entry["frozen"])


def count_weights(model: Path) -> tuple[int, int]:
    """The numbers of all weights of a model, and of its embeddings."""
    from surefoot.models.pretrained import meta_model

    whole = meta_model(model)
    return sum(p.numel() for p in whole.parameters()), whole.get_input_embeddings().weight.numel()


def trl_in_four_bits(peer: Path, data: Path, model: Path, steps: int) -> dict[str, Any]:
    arguments = ["--model", str(model), "--data", str(data), "--targets", "all", "--steps", str(steps), "--no-shuffle"]
    printed = run(str(HERE / "trl_in_four_bits.py"), str(peer), *arguments)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    """Every comparison, one after the other, as rows of the table."""
    data = as_pairs(arguments.data, work / "gsm8k.jsonl", 2000)
    dense = resolve_model(MODEL)
    moe = surefoot.upcycle(MODEL, work / "moe", num_experts=8, top_k=2)
    name = "MoE x8 top-2, LoRA attention + experts"
    stored, plain = [], []
    for number in range(arguments.rounds):
        stored.append(ours(data, moe, "experts", arguments.steps, work / f"nf4-{number}", **NF4))
        plain.append(ours(data, moe, "experts", arguments.steps, work / f"float-{number}"))
    yield from table(f"{name}, NF4 and float32", stored, plain)
    lean: dict[str, Any] = {"gradient_checkpointing": True}
    sides = [
        [ours(data, moe, "experts", arguments.steps, work / f"lean-{number}-{len(changes)}", **lean, **changes)]
        for number, changes in enumerate((NF4, {}))
    ]
    yield from table(f"{name}, NF4 and float32, gradient checkpointing", *sides)
    weights, embeddings = count_weights(moe)
    held, halves = count_frozen_bytes(work / "nf4-0"), BFLOAT16_BYTES * weights
    without = (held - 4 * embeddings) / (halves - BFLOAT16_BYTES * embeddings)
    yield (
        f"| {name}: frozen weights, MiB: NF4 (embeddings in float32) and all in bfloat16 | {held / 2**20:.0f} | "
        f"{halves / 2**20:.0f} | {held / halves:.2f} x; {without:.2f} x without embeddings |"
    )
    ends = [
        statistics.mean(
            ours(data, moe, "experts", arguments.loss_steps, work / f"loss-{number}", **changes)["loss"][-LAST_LOSSES:]
        )
        for number, changes in enumerate((NF4, {}))
    ]
    yield (
        f"| {name}: loss, mean of the last {LAST_LOSSES} of {arguments.loss_steps} steps | {ends[0]:.4f} | "
        f"{ends[1]:.4f} | {ends[0] / ends[1] - 1:+.1%} |"
    )
    turns = [
        (
            ours(data, dense, "all", arguments.steps, work / f"dense-{number}", **NF4),
            trl_in_four_bits(arguments.peer, arguments.data, dense, arguments.steps),
        )
        for number in range(arguments.rounds)
    ]
    mine, theirs = ([pair[side] for pair in turns] for side in (0, 1))
    yield from table("dense, LoRA all linear layers, NF4 in both: Surefoot and TRL + PEFT + bitsandbytes", mine, theirs)


def main() -> None:
    parser = make_parser(__doc__, steps=10)
    parser.add_argument("--loss-steps", type=int, default=100)
    arguments = parser.parse_args()
    rows = collect_rows(measure, arguments)
    write_table(
        arguments.results,
        "nf4-cpu",
        "Frozen weights in NF4, on SmolLM2-135M",
        settings=f"GSM8K, batch 4, LoRA r=8, {os.cpu_count()} threads",
        notes=[
            f"{arguments.rounds} rounds in turns of {arguments.steps - 2} steps, after 2 of warm-up: medians, and in",
            "brackets the least and the most. Double quantisation, blocks of 64.",
        ],
        columns=["NF4", "compared with", "ratio or difference"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
