"""DPO or a reward model with TRL + PEFT, as a user would train it: prints a JSON line with speed, memory and losses.

    python trl_pairs.py --method dpo --model FOLDER --data pairs.jsonl --targets all --steps 8

Tokens are those of both answers with their questions, without padding. The first two steps are warm-up.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

WARMUP_STEPS = 2
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Watch(TrainerCallback):  # type: ignore[misc]
    """The time of each step, and what is logged."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.step_s.append(time.perf_counter() - self.began)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.logged.append(dict(logs))


class InOrder:
    """The rows in the order of the file, for a trainer."""

    train_dataset: Any

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(dataset or self.train_dataset)


class DPOInOrder(InOrder, DPOTrainer):  # type: ignore[misc]
    """DPO on the rows in the order of the file."""


class RewardInOrder(InOrder, RewardTrainer):  # type: ignore[misc]
    """A reward model on the rows in the order of the file."""


def load_model(method: str, folder: str) -> PreTrainedModel:
    """Return the model that a method trains, in float32."""
    if method == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["dpo", "reward"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--targets", choices=["all", "experts"], default="all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-shuffle", action="store_true", help="always so here")
    arguments = parser.parse_args()
    with open(arguments.data) as lines:
        dataset = Dataset.from_list([json.loads(line) for line in lines])
    has_experts, is_reward = arguments.targets == "experts", arguments.method == "reward"
    watch = Watch()
    trainer = (RewardInOrder if is_reward else DPOInOrder)(
        load_model(arguments.method, arguments.model),
        args=(RewardConfig if is_reward else DPOConfig)(
            output_dir=tempfile.mkdtemp(prefix="trl_pairs-"),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_length=1024,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
        ),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=LINEAR[:4] if has_experts else LINEAR,
            target_parameters=EXPERTS if has_experts else None,
            task_type="SEQ_CLS" if is_reward else "CAUSAL_LM",
        ),
        callbacks=[watch],
    )
    trainer.train()
    timed_s = watch.step_s[WARMUP_STEPS:]
    tokens = watch.logged[arguments.steps - 1]["num_tokens"] - watch.logged[WARMUP_STEPS - 1]["num_tokens"]
    result = {
        "step_time_s": statistics.median(timed_s),
        "tokens_per_second": tokens / sum(timed_s),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loss": [step["loss"] for step in watch.logged[: arguments.steps]],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
