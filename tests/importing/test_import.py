"""Runs of other programs as people write them, and what becomes of them here."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot import cli
from surefoot.config import load_config
from surefoot.importing.convert import Imported, convert
from surefoot.importing.read import read

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

ZERO3 = {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


def imported(path: Path, text: str) -> Imported:
    path.write_text(text)
    return convert(read(str(path)))


def values(made: Imported) -> dict[str, Any]:
    return {name: value for name, (value, _) in made.settings.items()}


def test_the_script_that_hangs_at_its_start_has_three_contradictions(tmp_path: Path) -> None:
    made = imported(tmp_path / "train.sh", GRPO_72B)
    causes = [finding.cause for finding in made.findings]
    assert [finding.code for finding in made.findings] == ["SF720"] * 3
    assert "vllm_max_model_len=2048 holds no prompt" in causes[0]
    assert "MAX_PIXELS=640000" in causes[0]
    assert "the model has about 144 GB" in causes[1]
    assert "ZeRO-3 gathers the whole model, about 144 GB" in causes[2]
    assert values(made)["method"] == "grpo"
    assert values(made)["nproc_per_node"] == 8
    assert values(made)["deepspeed"] == "zero3_offload"
    assert values(made)["learning_rate"] == 1e-6
    assert [item["func"] for item in values(made)["reward_funcs"]] == ["math_verify", "regex"]
    assert any(what.startswith("eval_steps = 1000") for what in made.left_out)
    assert made.unknown == []
    assert made.variables == {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert made.settings["max_pixels"] == (640000, "MAX_PIXELS")
    (tmp_path / "run.yaml").write_text(made.as_yaml())
    run = load_config(tmp_path / "run.yaml", ["deepspeed=null"]).run
    assert (run.method, run.num_generations, run.temperature, run.max_completion_length) == ("grpo", 4, 1.1, 2048)


def test_a_mixture_of_experts_with_zero_3_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    made = imported(tmp_path / "train.sh", MIXTRAL_ZERO3)
    (tmp_path / "run.yaml").write_text(made.as_yaml())
    run = load_config(tmp_path / "run.yaml").run
    assert (run.zero_stage, run.nproc_per_node, run.offload) == (3, 8, "cpu")
    assert (run.max_length, run.target_modules, run.lora_alpha) == (4096, ["q_proj", "v_proj"], 16)
    assert (run.num_train_epochs, run.learning_rate, run.gradient_checkpointing) == (1.0, 5e-5, True)
    assert run.output_dir == str(tmp_path / "output")
    assert [finding.evidence for finding in made.findings] == [{}]
    assert "fp16" in made.findings[0].cause
    assert any(what.startswith("template = mistral") for what in made.left_out)
    assert any(what.startswith("fp16 = True") for what in made.left_out)
    assert made.unknown == []


FILES = {
    "llama-factory": (
        "model_name_or_path: some/model\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 64\n"
        "lora_target: all\ndataset: a,b\ntemplate: qwen\ncutoff_len: 8192\npreprocessing_num_workers: 16\n"
        "output_dir: saves\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 4\nlearning_rate: 2.0e-4\n"
        "lr_scheduler_type: cosine\nwarmup_ratio: 0.05\nbf16: true\n",
        {"lora_rank": 64, "lora_alpha": 128, "max_length": 8192, "num_train_epochs": 3, "dataset_dir": "data",
         "target_modules": "all", "dtype": "bfloat16", "gradient_checkpointing": True},
    ),
    "trl": (
        "model_name_or_path: some/model\ndataset_name: some/data\nuse_peft: true\nlora_r: 32\nmax_length: 4096\n"
        "packing: true\noutput_dir: out\nlearning_rate: 1.0e-4\nmax_steps: 100\n",
        {"tuning": "lora", "lora_rank": 32, "lora_alpha": 32, "max_length": 4096, "packing": True, "max_steps": 100,
         "dataset": "some/data", "target_modules": ["q_proj", "v_proj"]},
    ),
    "axolotl": (
        "base_model: some/model\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
        "sequence_len: 2048\nsample_packing: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "num_epochs: 2\nlr_scheduler: cosine\nlearning_rate: 0.0002\n"
        "datasets:\n  - path: some/data\n    type: alpaca\noutput_dir: out\nbf16: auto\n"
        "load_in_4bit: false\n",
        {"tuning": "lora", "target_modules": "all", "max_length": 2048, "packing": True,
         "per_device_train_batch_size": 2, "num_train_epochs": 2,
         "dataset": [{"path": "some/data", "format": "alpaca"}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_programs(name: str, tmp_path: Path) -> None:
    text, expected = FILES[name]
    made = imported(tmp_path / "theirs.yaml", text)
    found = values(made)
    assert {key: found.get(key) for key in expected} == expected
    assert made.unknown == []
    (tmp_path / "run.yaml").write_text(made.as_yaml())
    load_config(tmp_path / "run.yaml")


def test_defaults_of_the_other_program_are_written_down(tmp_path: Path) -> None:
    made = imported(tmp_path / "a.sh", "swift sft --model some/model --dataset 'a.jsonl#500' b.jsonl --train_type lora")
    found = values(made)
    assert found["dataset"] == [{"path": "a.jsonl", "split": "[:500]"}, "b.jsonl"]
    assert (found["lora_alpha"], found["weight_decay"], found["adam_beta2"]) == (32, 0.1, 0.95)
    assert "lora_alpha: 32  # default of ms-swift" in made.as_yaml()


def test_a_deepspeed_json(tmp_path: Path) -> None:
    made = imported(tmp_path / "ds.json", json.dumps(ZERO3))
    assert made.program == "DeepSpeed"
    assert Path(values(made)["deepspeed"]).name == "ds.json"


def test_options_that_are_not_known_are_listed(tmp_path: Path) -> None:
    made = imported(tmp_path / "a.sh", "swift sft --model some/model --dataset a.jsonl --use_flux true --lora_r 4")
    assert made.unknown == ["use_flux = True"]
    assert "# not known: use_flux = True" in made.as_yaml()


def test_every_line_of_what_is_written_has_its_origin(tmp_path: Path) -> None:
    made = imported(tmp_path / "theirs.yaml", FILES["llama-factory"][0])
    said = made.as_yaml()
    assert "lora_rank: 64  # lora_rank of theirs.yaml:5" in said
    assert yaml.safe_load(said)["lora_rank"] == 64


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "echo nothing\n", "no command of a program that is known"),
        ("a.sh", "swift sft --model 'x\n", "cannot be read as a shell script"),
        ("a.yaml", "[1, 2]", "holds no settings by name"),
        ("a.yaml", "a: [", "is no YAML"),
        ("a.json", "{", "is no JSON"),
        ("a.yaml", "color: red\n", "settings of no program that is known: color"),
        ("a.sh", "swift sft --model m --dataset d --learning_rate fast", "learning_rate='fast'"),
        ("a.sh", "NPROC_PER_NODE=many swift sft --model m --dataset d", "NPROC_PER_NODE=many"),
    ],
)
def test_what_cannot_be_imported(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["import", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.yaml"
    command = ["import", "--to", str(target), "--", "swift", "sft", "--model", "some/model", "--dataset", "a.jsonl"]
    assert cli.main(command) == 0
    assert load_config(target).run.model == "some/model"
    assert cli.main(command) == 2, "nothing is written over"
    assert "there is such a file" in capsys.readouterr().err
    assert cli.main(["import"]) == 2
    assert cli.main(["import", "--json", "--", "trl", "sft", "--model_name_or_path", "m", "--dataset_name", "d"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["tuning"] == "full"


def test_towers_of_other_programs_are_adapted_or_trained(tmp_path: Path) -> None:
    command = "swift sft --model m --dataset a.jsonl --train_type {tuning} --freeze_vit {frozen}\n"
    for tuning, frozen, targets, freezes in (
        ("lora", "false", ["all", "vision"], None),
        ("lora", "true", "all", None),
        ("full", "false", None, False),
        ("full", "true", None, True),
    ):
        found = values(imported(tmp_path / "train.sh", command.format(tuning=tuning, frozen=frozen)))
        assert found.get("target_modules") == targets
        assert found.get("freeze_vision_tower") == freezes
