"""GKD with TRL + PEFT, as a user would train it, on the rows alone: prints a JSON line with speed, memory and losses.

    python trl_distill.py --model FOLDER --teacher FOLDER --data rows.jsonl --targets all --steps 8

Tokens are those of the rows, without padding. The first two steps are warm-up.
"""

import argparse
import json
import resource
import statistics
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl_pairs import EXPERTS, LINEAR, WARMUP_STEPS, InOrder, Watch

BATCH = 4


class GKDInOrder(InOrder, GKDTrainer):  # type: ignore[misc]
    """GKD on the rows in the order of the file."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--targets", choices=["all", "experts"], default="all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-shuffle", action="store_true", help="always so here")
    arguments = parser.parse_args()
    with open(arguments.data) as lines:
        rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    has_experts, watch = arguments.targets == "experts", Watch()
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (arguments.model, arguments.teacher)
    )
    trainer = GKDInOrder(
        student,
        teacher_model=teacher,
        args=GKDConfig(
            output_dir=tempfile.mkdtemp(prefix="trl_distill-"),
            max_steps=arguments.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_length=512,
            lmbda=0.0,
            beta=0.5,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=LINEAR[:4] if has_experts else LINEAR,
            target_parameters=EXPERTS if has_experts else None,
            task_type="CAUSAL_LM",
        ),
        callbacks=[watch],
    )
    trainer.train()
    timed_s = watch.step_s[WARMUP_STEPS:]
    timed_rows = rows[WARMUP_STEPS * BATCH : arguments.steps * BATCH]
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in timed_rows]
    tokens = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    result = {
        "step_time_s": statistics.median(timed_s),
        "tokens_per_second": tokens / sum(timed_s),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loss": [step["loss"] for step in watch.logged[: arguments.steps]],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
