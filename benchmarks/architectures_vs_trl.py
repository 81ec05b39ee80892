"""SFT of a hybrid model and of gpt-oss's shape: packed, one sample at a time, and by TRL + PEFT, in one run.

    python benchmarks/architectures_vs_trl.py --peer trl_sft.py --data gsm8k/train.jsonl

PEER and DATA are those of sft_vs_trl.py. The models have the layers of Qwen3.5-MoE (gated delta rule and attention) and
of gpt-oss (sinks and windows; experts with biases, transposed and clamped), about 100 million random weights, and the
tokenizer of SmolLM2. LoRA is on the same projections of attention and on the experts, in float32 on the CPU. The three
take turns, several times. Prints a table and writes it, with the machine and versions, under benchmarks/results/.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from result_table import write_table
from sft_vs_trl import MODEL, WARMUP_STEPS, as_pairs, collect_rows, make_parser, ours, trl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefoot.models.resolve_model import resolve_model

PACK_LENGTH = 1024
"""Tokens of a packed row: about five rows of GSM8K."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
COMMON = {"hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {
        **COMMON,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "gpt_oss": {
        **COMMON,
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
    },
}
NAMES = {"qwen3_5_moe_text": "Qwen3.5-MoE shape", "gpt_oss": "gpt-oss shape"}


def write_model(model_type: str, folder: Path) -> int:
    """A model of that shape with SmolLM2's tokenizer; returns its number of weights."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), tie_word_embeddings=True, **SHAPES[model_type])
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def compare(first: list[float], second: list[float]) -> str:
    """Median of the ratios of runs side by side, with the least and the most."""
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"


def measure(arguments: argparse.Namespace, work: Path) -> Iterator[str]:
    """A row of the table for each shape and quantity."""
    data = as_pairs(arguments.data, work / "gsm8k.jsonl", 400)
    for model_type, name in NAMES.items():
        folder = work / model_type
        num_weights = write_model(model_type, folder)
        runs: dict[str, list[dict[str, Any]]] = {"packed": [], "alone": [], "trl": []}
        settings: dict[str, Any] = {"target_modules": [*PROJECTIONS, "experts"]}
        for number in range(arguments.rounds):
            packing = {**settings, "packing": True, "max_length": PACK_LENGTH, "per_device_train_batch_size": 1}
            packed = ours(data, folder, "experts", arguments.steps, work / f"{model_type}-p{number}", **packing)
            single = {**settings, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 5}
            alone = ours(data, folder, "experts", arguments.steps, work / f"{model_type}-a{number}", **single)
            runs["packed"].append(packed)
            runs["alone"].append(alone)
            runs["trl"].append(trl(arguments.peer, arguments.data, folder, "experts", arguments.steps))
        for quantity, key, unit, digits in (
            ("tokens/s", "tokens_per_second", 1, 1),
            ("peak RSS, GiB", "peak_memory_bytes", 2**30, 2),
        ):
            values = {side: [run[key] / unit for run in rounds] for side, rounds in runs.items()}
            medians = " | ".join(f"{statistics.median(values[side]):.{digits}f}" for side in runs)
            ratios = f"{compare(values['packed'], values['alone'])} | {compare(values['packed'], values['trl'])}"
            yield f"| {name}, {num_weights / 1e6:.0f} M: {quantity} | {medians} | {ratios} |"


def main() -> None:
    arguments = make_parser(__doc__, steps=8).parse_args()
    rows = collect_rows(measure, arguments)
    write_table(
        arguments.results,
        "architectures-cpu",
        "SFT of a hybrid model and of gpt-oss's shape: packed, one sample at a time, and TRL + PEFT",
        settings="GSM8K, random weights",
        notes=[
            "LoRA r=8 on the q, k, v and o projections and on the experts, on every side. Packed: rows of",
            f"{PACK_LENGTH} tokens. One sample at a time: five micro-batches of one row. TRL: batches of 4, padded.",
            f"{arguments.rounds} rounds in turns of {arguments.steps - WARMUP_STEPS} steps after {WARMUP_STEPS} of",
            "warm-up: medians; ratios are of runs side by side, with the least and the most in brackets.",
        ],
        columns=["packed", "one sample at a time", "TRL + PEFT", "packed : one at a time", "packed : TRL"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
