"""Commands of ms-swift's Megatron."""

from typing import Any

import pytest

from surefoot.errors import ConfigError
from tests.support.imports import get_values, import_command

SFT = "megatron sft --model m --dataset d.jsonl"


def test_a_run_of_megatron_keeps_its_numbers() -> None:
    run = import_command(
        "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --dataset d.jsonl --train_type lora --lora_rank 16 "
        "--target_modules all-linear --tensor_model_parallel_size 2 --expert_model_parallel_size 4 "
        "--moe_aux_loss_coeff 1e-3 --micro_batch_size 2 --global_batch_size 32 --recompute_granularity full "
        "--recompute_method uniform --recompute_num_layers 1 --max_epochs 2 --finetune true --lr 1e-4 --min_lr 1e-5 "
        "--lr_warmup_fraction 0.05 --save out --save_interval 200 --max_length 8192 --packing true "
        "--sequence_parallel true --moe_grouped_gemm true --attention_backend flash --load_safetensors true"
    )
    wanted = {
        "output_dir": "out", "tuning": "lora", "lora_rank": 16, "lora_alpha": 32, "target_modules": "all",
        "router_aux_loss_coef": 1e-3, "max_length": 8192, "truncation": "drop", "packing": True,
        "global_batch_size": 32, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "warmup_ratio": 0.05,
        "min_lr_ratio": pytest.approx(0.1), "weight_decay": 0.1, "adam_beta2": 0.95, "num_train_epochs": 2,
        "gradient_checkpointing": True, "nproc_per_node": 8, "zero_stage": 3, "expert_parallel_size": 4,
        "save_steps": 200, "logging_steps": 5, "gradient_accumulation_steps": None, "lora_dropout": None,
    }  # fmt: skip
    values = get_values(run)
    assert {name: values.get(name) for name in wanted} == wanted
    assert "tensor_model_parallel_size = 2" in run.left_out
    assert run.unknown == []
    assert run.findings == []


@pytest.mark.parametrize(
    ("options", "wanted", "left_out"),
    [
        ("", {"tuning": "full", "learning_rate": 1e-5, "global_batch_size": 16, "zero_stage": None}, None),
        ("--tuner_type lora", {"learning_rate": 1e-4, "lora_dropout": 0.05}, None),
        ("--pipeline_model_parallel_size 2", {"zero_stage": 3}, "pipeline_model_parallel_size = 2"),
        ("--context_parallel_size 4", {"zero_stage": None}, "context_parallel_size = 4"),
        ("--tensor_model_parallel_size 1 --context_parallel_size 1", {"zero_stage": None}, None),
        ("--recompute_granularity none", {"gradient_checkpointing": False}, None),
        ("--recompute_granularity selective", {"gradient_checkpointing": None}, None),
        ("--optimizer_cpu_offload true", {"offload": "cpu"}, None),
        ("--load mcore_folder", {}, "load = mcore_folder"),
        ("--lr_warmup_iters 0 --train_iters 300 --clip_grad 0.5", {"max_steps": 300, "max_grad_norm": 0.5}, None),
        ("--moe_expert_capacity_factor 2", {}, "moe_expert_capacity_factor = 2"),
        ("--save_interval 50 --split_dataset_ratio 0.1", {"save_steps": 50, "eval_steps": 50}, None),
    ],
)  # fmt: skip
def test_options_of_megatron(options: str, wanted: dict[str, Any], left_out: str | None) -> None:
    run = import_command(f"{SFT} {options}")
    values = get_values(run)
    assert {name: values.get(name) for name in wanted} == wanted
    sizes = [name for name in run.left_out if "=" in name and not name.startswith("the hub")]
    assert sizes == ([left_out] if left_out else [])
    assert run.unknown == []


def test_other_methods_of_megatron() -> None:
    values = get_values(import_command("megatron rlhf --rlhf_type dpo --model m --dataset d --beta 0.2 --rpo_alpha 1"))
    assert {name: values[name] for name in ("method", "beta", "sft_weight")} == {
        "method": "dpo", "beta": 0.2, "sft_weight": 1,
    }  # fmt: skip
    assert get_values(import_command("megatron pt --model m --dataset d"))["train_on"] == "all"


def test_modules_under_megatrons_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"names of transformers"):
        import_command(f"{SFT} --train_type lora --target_modules linear_qkv linear_proj")
