"""Settings of other programs that work against each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.errors import ConfigError
from tests.support.imports import SWIFT, SWIFT_GRPO, ZERO3, get_values, import_command, import_file

GRPO_72B = """
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=8 \\
MAX_PIXELS=640000 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model /models/Qwen2.5-VL-72B-Instruct \\
    --train_type lora \\
    --dataset /data/rows.json \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --max_length 2048 \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 1 \\
    --eval_steps 1000 \\
    --save_steps 2000 \\
    --learning_rate 1e-6 \\
    --save_total_limit 2 \\
    --output_dir /runs/grpo \\
    --warmup_ratio 0.05 \\
    --dataloader_num_workers 4 \\
    --max_completion_length 2048 \\
    --external_plugins plugin.py \\
    --reward_funcs accuracy format \\
    --num_generations 4 \\
    --use_vllm true \\
    --vllm_gpu_memory_utilization 0.3 \\
    --vllm_max_model_len 2048 \\
    --deepspeed zero3_offload \\
    --temperature 1.1
"""
"""As in modelscope/ms-swift#3592, which hangs at its start."""

MIXTRAL_ZERO3 = """
output_dir=output
if [ ! -d ${output_dir} ];then
    mkdir -p ${output_dir}
fi
torchrun --nnodes 1 --nproc_per_node 8 --master_port 12088 src/train_bash.py  \\
    --stage sft \\
    --deepspeed ds.json \\
    --cutoff_len 4096 \\
    --template mistral \\
    --model_name_or_path /models/Mixtral-8x7B-Instruct \\
    --do_train \\
    --dataset self_cognition \\
    --finetuning_type lora \\
    --lora_target q_proj,v_proj \\
    --output_dir ${output_dir} \\
    --overwrite_output_dir \\
    --per_device_train_batch_size 1 \\
    --lr_scheduler_type cosine \\
    --save_steps 500 \\
    --learning_rate 5e-5 \\
    --num_train_epochs 1.0 \\
    --plot_loss \\
    --fp16 | tee train.log
"""
"""As in hiyouga/LLaMA-Factory#1998, where ZeRO-3 with a MoE hangs."""

QWEN_MOE_ZERO3 = """
deepspeed --num_gpus 8 ../../src/train_bash.py \\
    --deepspeed ../deepspeed/ds_z3_config.json \\
    --stage sft \\
    --do_train \\
    --model_name_or_path Qwen1.5-MoE-A2.7B-Chat \\
    --dataset custom_data\\
    --dataset_dir ../../data \\
    --template default \\
    --finetuning_type full \\
    --output_dir ../../saves/moe/full/sft \\
    --overwrite_cache \\
    --overwrite_output_dir \\
    --cutoff_len 3000 \\
    --preprocessing_num_workers 16 \\
    --per_device_train_batch_size 1 \\
    --per_device_eval_batch_size 1 \\
    --gradient_accumulation_steps 2 \\
    --lr_scheduler_type cosine \\
    --logging_steps 10 \\
    --warmup_steps 20 \\
    --save_steps 1000 \\
    --learning_rate 5e-5 \\
    --num_train_epochs 1.0 \\
    --ddp_timeout 180000000 \\
    --plot_loss \\
    --fp16 \\
    --save_total_limit 1
"""
"""As in hiyouga/LLaMA-Factory#3147: all GPUs at 100 %, and no step is ever done."""


def test_the_script_that_hangs_at_its_start_has_three_contradictions(tmp_path: Path) -> None:
    run = import_file(tmp_path / "train.sh", GRPO_72B)
    assert [finding.code for finding in run.findings] == ["SF720"] * 3
    assert [finding.evidence for finding in run.findings] == [
        {"window": 2048, "needed": 4096}, {"needed_gb": 144, "room_gb": 42}, {"gathered_gb": 144},
    ]  # fmt: skip
    assert "MAX_PIXELS=640000" in run.findings[0].cause
    assert get_values(run)["method"] == "grpo"
    assert get_values(run)["nproc_per_node"] == 8
    assert get_values(run)["deepspeed"] == "zero3_offload"
    assert get_values(run)["learning_rate"] == 1e-6
    assert [item["func"] for item in get_values(run)["reward_funcs"]] == ["math_verify", "regex"]
    assert any(what.startswith("eval_steps = 1000") for what in run.left_out)
    assert run.unknown == []
    assert run.variables == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert run.settings["max_pixels"] == (640000, "MAX_PIXELS")
    assert "vllm_max_model_len = 2048" in run.left_out, "the run asks for what it needs"
    assert get_values(run)["vllm_args"] == ["--gpu-memory-utilization=0.3"]
    (tmp_path / "run.yaml").write_text(run.as_yaml())
    run = load_config(tmp_path / "run.yaml", ["deepspeed=null"]).run
    assert (run.method, run.num_generations, run.temperature, run.max_completion_length) == ("grpo", 4, 1.1, 2048)


def test_a_mixture_of_experts_with_zero_3_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    imported = import_file(tmp_path / "train.sh", MIXTRAL_ZERO3)
    (tmp_path / "run.yaml").write_text(imported.as_yaml())
    run = load_config(tmp_path / "run.yaml").run
    assert (run.zero_stage, run.nproc_per_node, run.offload) == (3, 8, "cpu")
    assert (run.max_length, run.target_modules, run.lora_alpha) == (4096, ["q_proj", "v_proj"], 16)
    assert (run.num_train_epochs, run.learning_rate, run.gradient_checkpointing) == (1.0, 5e-5, True)
    assert run.output_dir == str(tmp_path / "output")
    experts, fp16 = imported.findings
    assert "each expert" in experts.cause
    assert fp16.evidence == {"asked": ["fp16: true"]}
    assert any(what.startswith("template = mistral") for what in imported.left_out)
    assert any(what.startswith("fp16 = True") for what in imported.left_out)
    assert imported.unknown == []


def test_experts_that_hang_under_zero_3_are_named_with_the_timeout_that_hides_it(tmp_path: Path) -> None:
    run = import_file(tmp_path / "train.sh", QWEN_MOE_ZERO3)
    experts, fp16 = run.findings
    assert [experts.code, fp16.code] == ["SF720", "SF720"]
    assert experts.evidence == {"ddp_timeout_s": 180000000}
    assert "2083 days" in experts.cause
    assert fp16.evidence == {"asked": ["fp16: true"]}
    settings = get_values(run)
    assert (settings["model"], settings["dataset"]) == ("Qwen1.5-MoE-A2.7B-Chat", "custom_data")
    assert (settings["tuning"], settings["nproc_per_node"], settings["max_length"]) == ("full", 8, 3000)
    assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == (1, 2)
    assert (settings["warmup_steps"], settings["save_total_limit"], settings["logging_steps"]) == (20, 1, 10)
    assert settings["gradient_checkpointing"] is True, "as LLaMA-Factory does where nothing is said"
    assert "zero_stage is 3" in run.left_out["deepspeed = ../deepspeed/ds_z3_config.json"]
    assert run.unknown == []
    (tmp_path / "run.yaml").write_text(run.as_yaml())
    run = load_config(tmp_path / "run.yaml").run
    assert (run.zero_stage, run.expert_parallel_size, run.tuning) == (3, 1, "full")


@pytest.mark.parametrize(
    ("command", "hangs"),
    [
        ("swift sft --model Qwen/Qwen3-30B-A3B --dataset a --deepspeed zero3_offload", True),
        ("swift sft --model Qwen/Qwen3-30B-A3B --dataset a --deepspeed zero2", False),
        ("swift sft --model Qwen/Qwen3-32B --dataset a --deepspeed zero3", False),
        ("trl sft --model_name_or_path mistralai/Mixtral-8x7B-v0.1 --dataset_name d --deepspeed stage3.json", True),
    ],
)
def test_it_takes_both_experts_and_zero_3(tmp_path: Path, command: str, hangs: bool) -> None:
    run = import_file(tmp_path / "a.sh", command)
    assert [finding.code for finding in run.findings] == ["SF720"] * hangs


def test_what_is_odd_is_said_of_runs_that_cannot_be_made_too() -> None:
    words = f"NNODES=2 {SWIFT_GRPO} --use_vllm true --vllm_max_model_len 4096 --max_length 4096"
    with pytest.raises(ConfigError, match=r"nnodes=2[\s\S]*SF720[\s\S]*vllm_max_model_len=4096"):
        import_command(f"{words} --max_completion_length 4096")


@pytest.mark.parametrize(("window", "is_odd"), [(14336, False), (14335, True)])
def test_a_window_that_fits_exactly_is_not_odd(window: int, is_odd: bool) -> None:
    words = f"{SWIFT_GRPO} --use_vllm true --max_length 12288 --max_completion_length 2048"
    assert bool(import_command(f"{words} --vllm_max_model_len {window}").findings) is is_odd


@pytest.mark.parametrize(("model", "gathered_gb"), [("Qwen2.5-1.5B", []), ("Qwen2.5-72B", [144])])
def test_a_gathered_model_is_odd_where_it_is_large(model: str, gathered_gb: list[int]) -> None:
    words = f"accelerate launch --zero_stage 3 grpo.py --model_name_or_path {model} --dataset_name d"
    found = import_command(f"{words} --reward_funcs accuracy_reward --use_vllm true").findings
    assert [finding.evidence["gathered_gb"] for finding in found] == gathered_gb
    assert not any("move_model_batches" in finding.fix for finding in found), "a setting of ms-swift alone"


@pytest.mark.parametrize("words", ["torch_dtype float16", "fp16 true", "mixed_precision fp16"])
def test_half_precision_is_odd_however_it_is_asked_for(words: str) -> None:
    asked = [words.replace(" ", ": ")]
    assert [finding.evidence["asked"] for finding in import_command(f"{SWIFT} --{words}").findings] == [asked]


def test_segments_beside_an_engine_that_sleeps_are_odd() -> None:
    words = f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {SWIFT_GRPO} --use_vllm true --sleep_level 1"
    assert [finding.evidence for finding in import_command(words).findings] == [
        {"allocator": "expandable_segments:True"}
    ]


def test_half_precision_of_a_deepspeed_file_is_odd(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    run = import_file(tmp_path / "run.sh", f"{SWIFT} --deepspeed ds.json\n")
    (finding,) = run.findings
    (asked,) = finding.evidence["asked"]
    assert asked.startswith("fp16.enabled ")
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}))
    assert not import_file(tmp_path / "run.sh", f"{SWIFT} --deepspeed ds.json\n").findings


@pytest.mark.parametrize(
    ("words", "is_noted"),
    [("--model Qwen/Qwen3-30B-A3B", True), ("--model Qwen/Qwen3-8B", False),
     ("--model Qwen/Qwen3-30B-A3B --target_modules all-linear all-router", True),
     ("--model Qwen/Qwen3-30B-A3B --target_modules q_proj", False),
     ("--model Qwen/Qwen3-30B-A3B --train_type full", False)],
)  # fmt: skip
def test_experts_and_routers_are_no_linear_layers(words: str, is_noted: bool) -> None:
    run = import_command(f"swift sft --dataset rows.jsonl {words}")
    assert any(what.startswith("experts") for what in run.left_out) == is_noted


@pytest.mark.parametrize(
    ("config", "targets"),
    [({"num_local_experts": 8}, "linear"), ({"text_config": {"num_experts": 4}}, "linear"),
     ({"num_experts": 0}, "all"), ({}, "all")],
)  # fmt: skip
def test_a_local_config_says_whether_a_model_has_experts(config: dict[str, Any], targets: Any, tmp_path: Path) -> None:
    folder = tmp_path / "my-moe"  # whatever its name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    run = import_file(tmp_path / "run.sh", "swift sft --model my-moe --dataset rows.jsonl\n")
    assert run.settings["target_modules"][0] == targets
