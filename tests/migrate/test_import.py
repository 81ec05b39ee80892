"""Runs of other programs as people write them, and what becomes of them here."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot import cli
from surefoot.config import known_fields, load_config
from surefoot.errors import ConfigError
from surefoot.migrate.convert import convert
from surefoot.migrate.parse_input import parse_run
from tests.support.imports import SWIFT, SWIFT_GRPO, TRL_GRPO, ZERO3, get_values, import_command, import_file

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


def subject(what: str) -> str:
    """Return what an entry of `left_out` is about: `their setting = value`, or a setting of ours that was not given."""
    name = what.partition(",")[0]
    return name if name in known_fields() else what


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_programs(name: str, tmp_path: Path) -> None:
    text, expected = FILES[name]
    run = import_file(tmp_path / "theirs.yaml", text)
    found = get_values(run)
    assert {key: found.get(key) for key in expected} == expected
    assert run.unknown == []
    (tmp_path / "run.yaml").write_text(run.as_yaml())
    load_config(tmp_path / "run.yaml")


def test_defaults_of_the_other_program_are_written_down(tmp_path: Path) -> None:
    run = import_file(
        tmp_path / "a.sh", "swift sft --model some/model --dataset 'a.jsonl#500' b.jsonl --train_type lora"
    )
    found = get_values(run)
    assert found["dataset"] == [{"path": "a.jsonl", "split": "[:500]"}, "b.jsonl"]
    assert (found["lora_alpha"], found["weight_decay"], found["adam_beta2"]) == (32, 0.1, 0.95)
    (line,) = [line for line in run.as_yaml().splitlines() if line.startswith("lora_alpha: 32  # ")]
    assert "ms-swift" in line


def test_a_deepspeed_json(tmp_path: Path) -> None:
    run = import_file(tmp_path / "ds.json", json.dumps(ZERO3))
    assert run.program == "DeepSpeed"
    assert Path(get_values(run)["deepspeed"]).name == "ds.json"


def test_a_run_yaml_of_this_program_needs_no_import(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: .*already.*surefoot train"):
        import_file(tmp_path / "a.yaml", "model: a/b\ndataset: a.jsonl\noutput_dir: out\nmax_length: 512\n")


def test_options_that_are_not_known_are_listed(tmp_path: Path) -> None:
    run = import_file(tmp_path / "a.sh", "swift sft --model some/model --dataset a.jsonl --use_flux true --lora_r 4")
    assert run.unknown == ["use_flux = True"]
    assert any(line.startswith("# ") and line.endswith(": use_flux = True") for line in run.as_yaml().splitlines())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("llamafactory-cli train a.sh", ["a.sh"]),
        ("trl sft --model_name_or_path m --report_to comet_ml wandb", ["report_to = comet_ml", 'report_to: ["wandb"]']),
        ("accelerate launch --mixed_precision fp8 sft.py --model_name_or_path m", ["mixed_precision = fp8"]),
        ("swift sft --model m --dataset a --train_sampler_random false", ["shuffle: false"]),
        ("swift sft -x 3 --model m --dataset a", ["-x = 3"]),
        ("swift sft --model m --dataset a -y", ["-y = True"]),
        ("swift sft stray --model m --dataset a", ["stray"]),
        (
            "accelerate launch --config_file z.yaml sft.py --model_name_or_path m --dataset_name d",
            ["config_file = z.yaml"],
        ),
        ("trl sft --model_name_or_path m --dataset_name d --optim galore_adamw", ["optim = galore_adamw"]),
        ("trl sft --model_name_or_path m --dataset_name d --save_strategy best", ["save_strategy = best"]),
        ("trl sft --model_name_or_path m --dataset_name d --push_to_hub", ["push_to_hub = True"]),
        ("trl sft --model_name_or_path m --dataset_name d --deepspeed z3.json", ["deepspeed = z3.json"]),
    ],
)
def test_nothing_is_dropped_in_silence(tmp_path: Path, command: str, said: list[str]) -> None:
    run = import_file(tmp_path / "a.sh", command)
    written = run.as_yaml()
    listed = {*run.unknown, *run.left_out, *(line.partition("  #")[0] for line in written.splitlines())}
    assert listed >= set(said), written
    assert all(one in written for one in said), written
    assert "-y" not in str(get_values(run).get("dataset"))


@pytest.mark.parametrize(
    ("before", "is_noted"), [("", True), ("USE_HF=0 ", True), ("USE_HF=1 ", False), ("export USE_HF=true; ", False)]
)
def test_a_run_may_take_ids_from_hugging_face(tmp_path: Path, before: str, is_noted: bool) -> None:
    run = import_file(tmp_path / "a.sh", f"{before}swift sft --model iic/m --dataset AI-ModelScope/d MS::a/b")
    assert {what for what, why in run.left_out.items() if "ModelScope" in why} == {
        "dataset = MS::a/b", *(["the hub of model = iic/m", "dataset = AI-ModelScope/d"] if is_noted else [])
    }  # fmt: skip
    assert run.unknown == []


def test_settings_that_are_not_needed_are_named_in_one_line(tmp_path: Path) -> None:
    run = import_file(
        tmp_path / "a.sh",
        "swift sft --model m --dataset a.jsonl --attn_impl flash_attn --dataloader_num_workers 4 "
        "--dataloader_pin_memory true",
    )
    assert run.not_needed == ["attn_impl", "dataloader_pin_memory"]
    assert "# not needed here: attn_impl, dataloader_pin_memory\n" in run.as_yaml()
    assert get_values(run)["dataloader_num_workers"] == 4


def test_what_says_the_same_is_not_listed(tmp_path: Path) -> None:
    command = (
        "trl sft --model_name_or_path m --dataset_name d --optim adamw_torch --save_strategy steps "
        "--report_to wandb --assistant_only_loss true"
    )
    run = import_file(tmp_path / "a.sh", command)
    left_out = [what for what in run.left_out if not what.startswith("nproc_per_node")]
    assert (left_out, run.unknown, get_values(run)["report_to"]) == ([], [], ["wandb"])


def test_texts_of_several_lines_stay_in_theirs(tmp_path: Path) -> None:
    text = (
        "base_model: m\ndatasets: [{path: a.jsonl}]\nchat_template_jinja: |\n  {% for m in messages %}\n  x: {{ m }}\n"
    )
    run = import_file(tmp_path / "theirs.yaml", text)
    assert yaml.safe_load(run.as_yaml())["model"] == "m"
    run = convert(
        parse_run(["FOO=a\nb: c", "swift", "sft", "--model", "m", "--dataset", "a", "--output_dir", "x\ny: 1"])
    )
    assert yaml.safe_load(run.as_yaml())["output_dir"] == "x\ny: 1"


def test_rewards_of_trl(tmp_path: Path) -> None:
    command = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward think_format_reward mine"
    run = import_file(tmp_path / "a.sh", command)
    assert [one["func"] for one in get_values(run)["reward_funcs"]] == ["math_verify", "regex", "file.py:mine"]
    assert sorted(map(subject, run.left_out)) == ["max_prompt_length", "nproc_per_node", "reward_funcs = mine"]


def test_a_deepspeed_json_is_looked_into(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "wall_clock_breakdown": True}
    run = import_file(tmp_path / "ds.json", json.dumps(config))
    assert any("offload_param.device" in one for one in run.left_out), run.left_out


def test_paths_are_those_of_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    text = "base_model: some/model\ndatasets: [{path: a.jsonl, split: train}]\ndeepspeed: ds.json\n"
    (tmp_path / "theirs.yaml").write_text(text + "output_dir: out\n")
    (tmp_path / "sub").mkdir()
    assert cli.main(["import", "--to", str(tmp_path / "sub/run.yaml"), str(tmp_path / "theirs.yaml")]) == 0
    said = yaml.safe_load((tmp_path / "sub/run.yaml").read_text())
    assert (said["dataset"][0]["path"], said["deepspeed"]) == ("../a.jsonl", "../ds.json")
    assert said["model"] == "some/model", "what is no file here is left as it is"
    assert said["output_dir"] == "../out", "which is not there yet"


def test_the_output_of_a_script_that_is_started_elsewhere_is_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "a.jsonl").write_text("{}")
    script = tmp_path / "scripts/run.sh"
    script.write_text("swift sft --model some/model --dataset a.jsonl --output_dir out\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", "--to", "run.yaml", str(script)]) == 0
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert (values["dataset"], values["output_dir"]) == (["a.jsonl"], "out")


def test_a_setting_of_the_file_is_not_listed_as_not_carried() -> None:
    run = import_command("trl sft --model_name_or_path m --dataset_name d")
    assert get_values(run)["train_on"] == "all"
    lines = run.as_yaml().splitlines()
    assert not [line for line in lines if line.startswith(tuple(f"# not carried: {name}" for name in run.settings))]
    assert [line for line in lines if line.startswith("# not given: train_on: ")]


def test_every_line_of_what_is_written_has_its_origin(tmp_path: Path) -> None:
    run = import_file(tmp_path / "theirs.yaml", FILES["llama-factory"][0])
    said = run.as_yaml()
    (line,) = [line for line in said.splitlines() if line.startswith("lora_rank: 64  # lora_rank ")]
    assert "theirs.yaml:5" in line
    assert yaml.safe_load(said)["lora_rank"] == 64


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "echo nothing\n", r"a\.sh: .*no command"),
        ("a.sh", "swift sft --model 'x\n", "shell script: "),
        ("a.yaml", "[1, 2]", r"a\.yaml: .*no settings"),
        ("a.yaml", "a: [", r"a\.yaml:1: .*valid YAML"),
        ("a.json", "{", r"a\.json:1: .*valid JSON"),
        ("a.yaml", "color: red\n", r"a\.yaml: .*program .*: color\b"),
        ("a.sh", "swift sft --model m --dataset d --learning_rate fast", "learning_rate='fast'"),
        ("a.yaml", "base_model: m\ndatasets:\n", r"datasets=None, .*list .*path .*\(a\.yaml:2\)"),
        ("a.yaml", "base_model: m\ndatasets: [a, b]\n", r"datasets=\['a', 'b'\], .*list"),
        ("a.yaml", "base_model: m\ndatasets: {path: a}\n", r"datasets=\{'path': 'a'\}, .*list"),
        ("a.yaml", "finetuning_type: lora\nmodel_name_or_path: m\ndataset: d\nlora_rank: big\n", "lora_rank='big'"),
        ("a.yaml", "train_type: lora\nmodel: m\ndataset: [{a: b}]\n", r"dataset=\[\{'a': 'b'\}\], .*\(a\.yaml:3\)"),
        ("a.json", '{"zero_optimization": {"stage": 9}}', "zero_stage"),
        ("a.sh", "NPROC_PER_NODE=many swift sft --model m --dataset d", "NPROC_PER_NODE=many"),
    ],
)
def test_what_cannot_be_imported(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["import", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert "Traceback" not in error


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.yaml"
    command = ["import", "--to", str(target), "--", "swift", "sft", "--model", "some/model", "--dataset", "a.jsonl"]
    assert cli.main(command) == 0
    assert load_config(target).run.model == "some/model"
    assert cli.main(command) == 2, "nothing is written over"
    assert f"--to {target}" in capsys.readouterr().err
    assert cli.main(["import"]) == 2
    assert cli.main(["import", "--json", "--", "trl", "sft", "--model_name_or_path", "m", "--dataset_name", "d"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["tuning"] == "full"


def test_what_is_not_carried_is_told_beside_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.yaml"
    words = ["--model", "m", "--dataset", "d.jsonl", "--lora_bias", "all", "--modle", "x"]
    assert cli.main(["import", "--to", str(target), "--", "swift", "sft", *words]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"written: {target}"
    assert any(line.startswith("not carried: lora_bias") for line in told)
    assert "not known: modle = x" in told
    target.unlink()
    assert cli.main(["import", "--to", str(target), "--", "swift", "rlhf", "--rlhf_type", "ppo", *words[:4]]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: method: ppo is not available")


def test_towers_of_other_programs_are_adapted_or_trained(tmp_path: Path) -> None:
    command = "swift sft --model m --dataset a.jsonl --train_type {tuning} --freeze_vit {frozen}\n"
    for tuning, frozen, targets, freezes in (
        ("lora", "false", ["all", "vision"], None),
        ("lora", "true", "all", None),
        ("full", "false", None, False),
        ("full", "true", None, True),
    ):
        found = get_values(import_file(tmp_path / "train.sh", command.format(tuning=tuning, frozen=frozen)))
        assert found.get("target_modules") == targets
        assert found.get("freeze_vision_tower") == freezes


def test_a_constant_schedule_of_transformers_has_no_warm_up(tmp_path: Path) -> None:
    """Not even that of axolotl's defaults."""
    text = "base_model: m\ndatasets: [{path: d, type: chat_template}]\nlr_scheduler: "
    assert get_values(import_file(tmp_path / "a.yml", text + "cosine\n"))["warmup_ratio"] == 0.03
    assert "warmup_ratio" not in get_values(import_file(tmp_path / "b.yml", text + "constant\n"))


@pytest.mark.parametrize(
    ("words", "settings", "left_out"),
    [
        (f"{SWIFT} --lr_scheduler_type constant_with_warmup --warmup_steps 9",
         {"lr_scheduler_type": "constant", "warmup_steps": 9}, None),
        (f"{SWIFT} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'",
         {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}, None),
        (f"{SWIFT} --lr_scheduler_type constant --warmup_steps 9",
         {"lr_scheduler_type": "constant", "warmup_steps": None, "warmup_ratio": None}, None),
        (f"{SWIFT} --lr_scheduler_type warmup_stable_decay --max_steps 200 --lr_scheduler_kwargs "
         "'{\"num_decay_steps\": 50, \"decay_type\": \"linear\", \"min_lr_ratio\": 0.1}'",
         {"lr_scheduler_type": "wsd", "decay_ratio": 0.25, "min_lr_ratio": 0.1}, None),
        (f"{SWIFT} --lr_scheduler_type warmup_stable_decay --max_steps 200 --lr_scheduler_kwargs "
         "'{\"num_decay_steps\": 50}'", {"lr_scheduler_type": "wsd", "decay_ratio": None},
         'lr_scheduler_kwargs = {"num_decay_steps": 50}'),
        (f"{SWIFT} --lr_scheduler_type greedy", {"lr_scheduler_type": None}, "lr_scheduler_type = greedy"),
        (f"{SWIFT} --torch_dtype float16", {"dtype": None}, "torch_dtype = float16"),
        (f"{SWIFT} --max_steps -1 --warmup_ratio 0.1 --warmup_steps 0", {"warmup_ratio": 0.1, "max_steps": None}, None),
        (f"{SWIFT} --save_steps 0.1", {"save_steps": None}, "save_steps = 0.1"),
        (f"{SWIFT} --val_dataset e --split_dataset_ratio 0.01", {"eval_dataset": "e"}, "eval_fraction = 0.01"),
        (f"{SWIFT} --loss_type cross_entropy", {"loss_type": None}, None),
        ("trl sft --model_name_or_path m --dataset_name d --no_gradient_checkpointing",
         {"gradient_checkpointing": False}, None),
        (f"{SWIFT} --no_gradient_checkpointing", {"gradient_checkpointing": False}, None),
        (f"{SWIFT} --columns '{{\"text1\": \"query\"}}'", {"columns": {"query": "text1"}}, None),
        (f"{SWIFT} --sft_type full", {"tuning": "full", "lora_alpha": None}, None),
        (f"{SWIFT} --load_in_8bit false --resume_from_checkpoint none", {}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --use_vllm true --top_k 50 "
         "--vllm_mode server --vllm_server_host 10.0.0.2 --vllm_server_port 8001",
         {"vllm_server": "http://10.0.0.2:8001", "max_completion_length": 512, "beta": 0.04, "temperature": 0.9}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --use_vllm true "
         "--vllm_gpu_memory_utilization 0.4 --vllm_tensor_parallel_size 2 --vllm_enforce_eager true",
         {"vllm_args": ["--gpu-memory-utilization=0.4", "--tensor-parallel-size=2", "--enforce-eager"]}, None),
        ("trl sft --model_name_or_path m --dataset_name d --save_strategy no", {"save_steps": 0}, None),
        ("swift sft --model m --dataset d --deepspeed zero2", {"weight_decay": 0.1, "adam_beta2": 0.95}, None),
        ("NNODES=4 NPROC_PER_NODE=8 MASTER_ADDR=a swift sft --model m --dataset d", {"gradient_accumulation_steps": 1},
         None),
        ("accelerate launch --num_machines 2 --num_processes 16 trl/scripts/sft.py --model_name_or_path m "
         "--dataset_name d", {"nproc_per_node": 8, "nnodes": 2}, None),
        ("swift sft --model m --dataset AI-ModelScope/alpaca:zh#500 --val_dataset b.jsonl#100",
         {"dataset": [{"path": "AI-ModelScope/alpaca", "subset": "zh", "split": "[:500]"}],
          "eval_dataset": {"path": "b.jsonl", "split": "[:100]"}}, "#100 of val_dataset = b.jsonl#100"),
        ("swift sft --model m --dataset a/b:zh", {}, "dataset = a/b:zh"),
        ("swift sft --model m --dataset d --dataset_shuffle false", {"shuffle": None}, None),
        ("swift sft --model m --dataset d --dataset_shuffle false --train_dataloader_shuffle false", {"shuffle": False},
         None),
        ("swift sft --model m --dataset d --adapters out/checkpoint-3", {"init_adapter": "out/checkpoint-3"}, None),
        ("swift sft --model m --dataset d --warmup_steps 0.03", {"warmup_ratio": 0.03, "warmup_steps": None}, None),
        ("swift sft --model m --dataset d --freeze_aligner false", {}, "freeze_aligner = False"),
        ("swift sft --model m --dataset d --freeze_aligner true", {}, None),
        ("swift rlhf --model m --dataset d", {"method": "dpo"}, None),
        ("swift rlhf --rlhf_type ppo --model m --dataset d", {"method": "ppo"}, "method = ppo"),
        ("trl sft --model_name_or_path m --dataset_name d --max_length null",
         {"max_length": None, "truncation": "error"}, "max_length = None"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --max_length 900",
         {"max_length": 900, "truncation": "left"}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy", {"truncation": "error"},
         "max_prompt_length"),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --max_prompt_length 512",
         {"max_prompt_length": 512, "truncation": "left"}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --shuffle_dataset false",
         {"shuffle": False, "truncation": "error"}, "max_prompt_length"),
        ("trl sft --model_name_or_path m --dataset_name d --shuffle_dataset false --assistant_only_loss false",
         {"shuffle": None, "train_on": "all"}, "train_on"),
        ("llamafactory-cli train --model_name_or_path m --dataset d", {"truncation": "drop"},
         "truncation"),
        ("llamafactory-cli train --model_name_or_path m --dataset a,b --eval_dataset c --max_samples 100",
         {"dataset": [{"path": "data/dataset_info.json", "name": name, "split": "[:100]"} for name in "ab"],
          "eval_dataset": [{"path": "data/dataset_info.json", "name": "c", "split": "[:100]"}], "dataset_dir": None},
         "truncation"),
        ("llamafactory-cli train --model_name_or_path m --dataset d --max_samples many", {"dataset": "d"},
         "max_samples = many"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --external_plugins p.py --reward_funcs mine",
         {"reward_funcs": None}, "external_plugins = p.py"),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true "
         "--vllm_mode colocate", {}, "vllm_mode = colocate"),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train --model_name_or_path m --dataset d --template qwen2_vl",
         {"nproc_per_node": 4, "max_pixels": 589824}, "template = qwen2_vl"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --use_vllm true --sleep_level 1",
         {"vllm_sleep": True, "truncation": "error", "importance_correction": "none", "lora_dropout": None}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true "
         "--vllm_mode colocate", {"vllm_args": ["--gpu-memory-utilization=0.3"]}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true "
         "--vllm_server_port 8001", {"vllm_server": "http://127.0.0.1:8001"}, None),
        ("python swift/cli/sft.py --model m --dataset d", {"tuning": "lora", "num_train_epochs": 3}, None),
        ("python -m swift.cli.sft --model m --dataset d", {"gradient_accumulation_steps": 16}, None),
        ("NNODES=2 MASTER_ADDR=10.0.0.1 swift sft --model m --dataset d", {"rdzv_endpoint": "10.0.0.1:29500"}, None),
        ("trl sft --model_name_or_path m --dataset_name d", {"train_on": "all"}, "train_on"),
        ("trl sft --model_name_or_path m --dataset_name d --assistant_only_loss true", {"train_on": "assistant"}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward",
         {"max_completion_length": 512, "train_on": None}, None),
        (f"{SWIFT} --num_train_epochs 3 --max_steps 100 --warmup_steps 5 --warmup_ratio 0.1",
         {"max_steps": 100, "num_train_epochs": None, "warmup_steps": 5, "warmup_ratio": None}, "num_train_epochs = 3"),
        (f"{SWIFT} --warmup_steps 5 --warmup_ratio 0.1", {"warmup_steps": 5}, "warmup_ratio = 0.1"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy format --reward_weights 1.0 0.1",
         {"reward_weights": [1.0, 0.1]}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --use_vllm true --top_p 0.9 "
         "--top_k 50", {"top_p": 0.9, "top_k": 50, "temperature": 0.9, "importance_correction": "none"}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --use_vllm true --top_p 0.9 "
         "--rollout_importance_sampling_mode token_truncate", {"top_p": 0.9, "temperature": None},
         "temperature = 0.9"),
        ("trl sft --model_name_or_path m --dataset_name d --save_strategy epoch --save_steps 20",
         {"save_steps": None, "saves_per_epoch": 1}, "save_steps = 20"),
        (f"{SWIFT} --save_steps 0.05", {"save_steps": None, "saves_per_epoch": 7}, "save_steps = 0.05"),
        (f"{SWIFT} --save_steps 0.5 --num_train_epochs 8", {"saves_per_epoch": 1}, "save_steps = 0.5"),
        (f"{SWIFT} --save_steps 0.05 --num_train_epochs 4", {"save_steps": None, "saves_per_epoch": 5}, None),
        (f"{SWIFT} --save_steps 0.05 --max_steps 305", {"save_steps": 16, "saves_per_epoch": None}, None),
        (f"{SWIFT} --save_strategy epoch --split_dataset_ratio 0.1 --eval_steps 5",
         {"saves_per_epoch": 1, "evals_per_epoch": 1, "eval_steps": None}, "eval_steps = 5"),
        (f"{SWIFT} --save_strategy epoch --split_dataset_ratio 0.1 --eval_strategy steps --eval_steps 5",
         {"saves_per_epoch": 1, "evals_per_epoch": None, "eval_steps": 5}, None),
        (f"{SWIFT} --save_strategy no --split_dataset_ratio 0.1", {"eval_fraction": None}, "eval_fraction = 0.1"),
        (f"{SWIFT} --eval_strategy epoch --split_dataset_ratio 0.1", {"evals_per_epoch": 1, "save_steps": 500}, None),
        (f"{SWIFT} --eval_strategy epoch", {"evals_per_epoch": None}, "evals_per_epoch = 1"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --scale_rewards none", {"scale_rewards": "none"},
         "reward_funcs"),
        (f"{SWIFT} --task_type embedding --loss_type infonce", {"method": "embedding"}, "method = embedding"),
        (f"{SWIFT} --task_type causal_lm", {"method": None}, None),
        (f"{SWIFT} --save_total_limit -1 --loss_scale last_round", {"train_on": "last_assistant"}, None),
        (f"{SWIFT} --eval_strategy no --split_dataset_ratio 0.1", {"eval_fraction": None}, "eval_fraction = 0.1"),
        (f"{SWIFT} --save_steps 70 --split_dataset_ratio 0.1", {"eval_steps": 70}, None),
        (f"{SWIFT} --target_modules '^(model.*)$'", {"target_modules": "^(model.*)$"}, None),
        (f"{SWIFT} --target_modules q_proj v_proj", {"target_modules": ["q_proj", "v_proj"]}, None),
        (f"{SWIFT} --target_modules q_proj, v_proj", {"target_modules": ["q_proj", "v_proj"]}, None),
        ("trl sft --model_name_or_path m --dataset_name d --lora_target_modules none", {"tuning": "full"}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_weights 1.0 0.1 0.2",
         {"reward_weights": [1.0, 0.1, 0.2]}, "reward_funcs"),
        (f"{SWIFT} --target_modules q_proj,v_proj", {"target_modules": ["q_proj", "v_proj"]}, None),
        (f"{SWIFT} --model_author me", {}, "model_author = me"),
        ("swift sft --model iic/gte --dataset hf::a/b:c#5 AI-ModelScope/x",
         {"dataset": [{"path": "a/b", "subset": "c", "split": "[:5]"}, "AI-ModelScope/x"]},
         "the hub of model = iic/gte"),
        ("trl sft --model_name m --dataset_name d --dataset_config c --eval_strategy steps",
         {"model": "m", "dataset": [{"path": "d", "subset": "c"}],
          "eval_dataset": {"path": "d", "subset": "c", "split": "test"}}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true "
         "--vllm_importance_sampling_correction false",
         {"importance_correction": "none", "vllm_args": ["--gpu-memory-utilization=0.3"]}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --vllm_importance_sampling_correction false "
         "--vllm_importance_sampling_mode token_truncate", {"importance_correction": "none"}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --vllm_importance_sampling_correction false "
         "--vllm_importance_sampling_clip_min 0.5", {"importance_correction": "none", "importance_floor": None}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true "
         "--vllm_importance_sampling_mode token_mask --vllm_importance_sampling_clip_min 0.5",
         {"importance_correction": "token_mask", "importance_floor": 0.5, "importance_cap": 3.0}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward --use_vllm true "
         "--vllm_importance_sampling_clip_min none", {"importance_floor": None}, None),
        ("trl grpo --model_name_or_path m --dataset_name d --vllm_importance_sampling_mode sequence_truncate",
         {"importance_correction": "sequence_truncate"}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --rollout_importance_sampling_mode none",
         {"importance_correction": "none"}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --use_vllm true --vllm_mode colocate "
         "--vllm_max_model_len 2400", {"vllm_args": None, "max_completion_length": 512}, "vllm_max_model_len = 2400"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --use_vllm true --vllm_mode colocate "
         "--vllm_max_model_len 2600", {"vllm_args": ["--max-model-len=2600"], "max_completion_length": 512}, None),
        ("accelerate launch --deepspeed_config_file ds_z3.json --offload_optimizer_device cpu --gradient_clipping 0.5 "
         "--gradient_accumulation_steps 8 sft.py --model_name_or_path m --dataset_name d",
         {"zero_stage": 3, "offload": "cpu", "max_grad_norm": 0.5, "gradient_accumulation_steps": 8, "deepspeed": None},
         "deepspeed = ds_z3.json"),
        ("accelerate launch --config_file none.yaml sft.py --model_name_or_path m --dataset_name d", {},
         "config_file = none.yaml"),
        ("deepspeed --include localhost:0,1,2,3 src/train_bash.py --stage sft --model_name_or_path m --dataset d",
         {"nproc_per_node": 4}, None),
        ("swift sft --model m --dataset d --deepspeed default-zero3", {"zero_stage": 3, "deepspeed": None},
         "deepspeed = default-zero3"),
        ("accelerate launch --zero_stage 3 --num_machines 2 --num_processes 4 --main_process_ip 10.0.0.7 "
         "--main_process_port 6000 sft.py --model_name_or_path m --dataset_name d",
         {"zero_stage": 3, "nproc_per_node": 2, "rdzv_endpoint": "10.0.0.7:6000"}, None),
        ("llamafactory-cli train --model_name_or_path m --dataset d", {"nproc_per_node": None},
         "nproc_per_node"),
        ("trl sft --model_name_or_path m", {"model": "m"}, "dataset"),
        ("accelerate launch --use_fsdp --fsdp_sharding_strategy 2 --fsdp_offload_params true sft.py "
         "--model_name_or_path m --dataset_name d", {"zero_stage": 2, "offload": "cpu"}, None),
        ("accelerate launch --use_fsdp true sft.py --model_name_or_path m --dataset_name d", {"zero_stage": 3}, None),
        ("swift sft --model m --dataset d --fsdp fsdp2", {"zero_stage": 3}, None),
        ("trl sft --model_name_or_path m --dataset_name d --fsdp 'no_shard auto_wrap'", {"zero_stage": 0}, None),
        ("NNODES=2 NPROC_PER_NODE=8 swift sft --model m --dataset d --fsdp 'hybrid_shard offload'",
         {"zero_stage": 3, "offload": "cpu"}, None),
        ("swift sft --model Qwen/Qwen3-30B-A3B --dataset d",
         {"lora_dropout": 0.05, "target_modules": "linear"}, "experts, among all linear layers"),
        ("swift sft --model m --dataset d --target_parameters mlp.experts.down_proj",
         {"lora_dropout": None, "target_modules": "mlp.experts.down_proj"}, "lora_dropout = 0.05"),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_name d", {"freeze_vision_tower": False},
         None),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_name d --use_peft "
         "--lora_target_modules all-linear", {"target_modules": ["all", "vision"]}, None),
        ("trl sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_name d --use_peft",
         {"target_modules": ["q_proj", "v_proj"], "freeze_vision_tower": None}, None),
        ("trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name d", {"freeze_vision_tower": None}, None),
        ("swift sft --model Qwen/Qwen2.5-VL-3B-Instruct --dataset d", {"target_modules": "all"}, None),
        ("swift sft --model Qwen/Qwen3-30B-A3B --dataset d --target_modules q_proj", {"lora_dropout": 0.05}, None),
        ("swift sft --model m --dataset d --freeze_llm true --freeze_vit false", {"target_modules": ["vision"]}, None),
        (f"{TRL_GRPO} --vllm_mode server", {"vllm_server": "http://127.0.0.1:8000", "vllm_args": None,
         "importance_correction": "sequence_mask", "importance_cap": 3.0}, None),
        (f"{TRL_GRPO} --vllm_server_host a b", {"vllm_server": "http://a:8000"}, "vllm_server_host = b"),
        (f"{TRL_GRPO} --vllm_device cuda:7", {"vllm_devices": "7"}, None),
        (f"{TRL_GRPO} --vllm_device auto", {"vllm_devices": None}, "vllm_device = auto"),
        (f"{SWIFT_GRPO} --importance_sampling_level sequence --epsilon 3e-4", {"loss_type": "gspo", "epsilon": 3e-4},
         None),
        (f"{SWIFT_GRPO} --loss_type grpo --importance_sampling_level sequence", {"loss_type": "gspo"}, None),
        (f"{SWIFT_GRPO} --loss_type grpo --importance_sampling_level token", {"loss_type": "grpo"}, None),
        (f"{SWIFT_GRPO} --loss_type bnpo --importance_sampling_level sequence", {"loss_type": "bnpo"},
         "importance_sampling_level = sequence"),
        (f"{SWIFT_GRPO} --advantage_estimator rloo --beta 0",
         {"advantage_estimator": "rloo", "beta": 0, "scale_rewards": "none"}, None),
        (f"{SWIFT_GRPO} --advantage_estimator reinforce_plus_plus --kl_in_reward false",
         {"advantage_estimator": "reinforce_plus_plus", "beta": 0.04, "kl_in_reward": None}, None),
        (f"{SWIFT_GRPO} --advantage_estimator rloo", {"kl_in_reward": True, "beta": 0.04}, None),
        (f"{SWIFT_GRPO} --kl_in_reward true --beta 0.1", {"kl_in_reward": True, "advantage_estimator": None}, None),
        (f"{SWIFT_GRPO} --loss_type sapo --tau_neg 1.2", {"loss_type": "sapo",
         "sapo_temperature_neg": 1.2}, None),
        (f"{SWIFT_GRPO} --soft_cache_length 19", {"soft_overlong_length": None}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy soft_overlong --soft_cache_length "
         "19", {"soft_overlong_length": 19}, None),
        ("swift sft --model m --dataset d --target_modules all-linear all-router",
         {"target_modules": ["all", "router"]}, None),
        ("swift sft --model m --dataset d --learning_rate 1e-4 --lr_scheduler_type cosine_with_min_lr "
         "--lr_scheduler_kwargs '{\"min_lr\": 1e-5}'", {"min_lr_ratio": pytest.approx(0.1)}, None),
        ("llamafactory-cli train --model_name_or_path m --dataset a/b --dataset_dir ONLINE", {"dataset_dir": None},
         "nproc_per_node"),
        ("deepspeed --include w0:0,1@w1:0,1 src/train_bash.py --stage sft --model_name_or_path m --dataset d",
         {"nproc_per_node": 2, "nnodes": 2}, None),
        (f"{SWIFT} --deepspeed zero3_no_offload.json", {"zero_stage": 3, "offload": None},
         "deepspeed = zero3_no_offload.json"),
        (f"{SWIFT} --deepspeed a100_quiz2.json", {"zero_stage": None}, "deepspeed = a100_quiz2.json"),
        ("accelerate launch --zero_stage 2 --gradient_clipping auto --gradient_accumulation_steps auto "
         "--offload_optimizer_device nvme sft.py --model_name_or_path m --dataset_name d",
         {"zero_stage": 2, "offload": "cpu", "max_grad_norm": None}, "offload_optimizer_device = nvme"),
        ("swift pt --model m --dataset d", {"train_on": "all", "method": None}, None),
        ("swift pt --model m --dataset d --truncation_strategy split", {"truncation": "split"}, None),
        ("llamafactory-cli train --stage pt --model_name_or_path m --dataset d",
         {"truncation": "split", "packing": True}, None),
        ("llamafactory-cli train --stage pt --model_name_or_path m --dataset d --packing false",
         {"truncation": "right", "packing": None}, None),
        ("llamafactory-cli train --model_name_or_path m --dataset d --use_swanlab true --swanlab_project p "
         "--swanlab_run_name r", {"report_to": ["swanlab"], "run_name": "r"}, "swanlab_project = p"),
        ("trl sft --model_name_or_path m --dataset_name d --completion_only_loss", {"train_on": "assistant"}, None),
        ("trl sft --model_name_or_path m --dataset_name d --completion_only_loss False", {"train_on": "all"}, None),
        ("llamafactory-cli train --stage pt --model_name_or_path m --dataset d", {"train_on": "all", "packing": True},
         None),
        ("llamafactory-cli train --stage pt --packing false --model_name_or_path m --dataset d", {"packing": None},
         None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs mine format --reward_weights 1 0.1",
         {"reward_weights": None, "reward_funcs": [{"func": "file.py:mine", "weight": 1.0}, {"func": "regex",
          "weight": 0.1, "args": {"pattern": r"\A<think>.*?</think>\s*<answer>.*?</answer>\Z"}}]},
         "reward_funcs = mine"),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --external_plugins p.py --reward_funcs accuracy mine",
         {"reward_funcs": [{"func": "math_verify", "args": {"answer_column": "solution"}},
          {"func": "p.py:mine"}]}, "reward_funcs = mine"),
        (f"{SWIFT} --sequence_parallel_size 4", {}, "sequence_parallel_size = 4"),
        ("trl sft --model_name_or_path m --dataset_name d --dataset_text_field body",
         {"columns": {"text": "body"}}, None),
        ("trl sft --model_name_or_path m --dataset_name d --dataset_text_field text", {"columns": None}, None),
        ("NPROC_PER_NODE=2 torchrun --nproc_per_node 2 '$(which swift)' sft --model m --dataset d",
         {"nproc_per_node": 2}, None),
        ("llamafactory-cli train --model_name_or_path m --dataset d --dataset_dir REMOTE:a/b", {"dataset_dir": None},
         "dataset_dir = REMOTE:a/b"),
        ("llamafactory-cli train --model_name_or_path m --dataset d --dataset_dir my/data", {"dataset_dir": "my/data"},
         "nproc_per_node"),
        ("swift sft --model m --dataset d --lora_dropout 0 --target_modules q_proj "
         "--target_parameters mlp.experts.gate_up_proj",
         {"target_modules": ["q_proj", "mlp.experts.gate_up_proj"]}, None),
        ("swift sft --model m --dataset d --lora_dropout 0 --target_parameters mlp.experts.down_proj",
         {"target_modules": "mlp.experts.down_proj"}, None),
        ("swift sft --model m --dataset d --target_modules all-linear --target_regex '.*[.](q|v)_proj'",
         {"target_modules": ".*[.](q|v)_proj"}, None),
        ("trl sft --model_name_or_path m --dataset_name d --use_peft --lora_target_modules '.*(up|down)_proj'",
         {"target_modules": ".*(up|down)_proj"}, None),
        ("trl sft --model_name_or_path m --dataset_name d --use_peft --lora_target_modules '.*q_proj' '.*v_proj'",
         {"target_modules": ["q_proj", "v_proj"]}, "lora_target_modules = ['.*q_proj', '.*v_proj']"),
        ("swift sft --model m --dataset d", {"learning_rate": 1e-4}, None),
        ("swift sft --model m --dataset d --tuner_type full", {"learning_rate": 1e-5}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d", {"learning_rate": 1e-4, "top_p": None}, None),
        ("swift rlhf --rlhf_type grpo --model m --dataset d --train_type lora", {"top_p": 0.9, "top_k": 50}, None),
    ],
)  # fmt: skip
def test_what_another_program_means(words: str, settings: dict[str, Any], left_out: str | None) -> None:
    """None: it is not written, or nothing of the kind is left out."""
    run = import_command(words)
    assert {name: run.settings.get(name, (None, ""))[0] for name in settings} == settings
    if left_out is not None:
        assert left_out in map(subject, run.left_out)
    else:
        told = ("top_k", "top_p", "save_steps", "vllm_mode", "the server at", "the hub of")
        others = [what for what in run.left_out if subject(what) not in known_fields()]
        assert not [what for what in others if not what.startswith(told)]
    assert run.unknown == []


def test_sharding_of_files_is_carried(tmp_path: Path) -> None:
    fsdp2 = "fsdp_config:\n  offload_params: true\n  reshard_after_forward: true\n  activation_checkpointing: true\n"
    axolotl = f"base_model: m\ndatasets:\n- path: d\n  type: chat_template\nfsdp_version: 2\n{fsdp2}"
    run = get_values(import_file(tmp_path / "a.yml", axolotl))
    assert (run["zero_stage"], run["offload"], run["gradient_checkpointing"]) == (3, "cpu", True)
    axolotl = axolotl.replace("reshard_after_forward: true", "reshard_after_forward: false")
    assert get_values(import_file(tmp_path / "b.yml", axolotl))["zero_stage"] == 2
    fsdp1 = "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_offload_params: false\n"
    (tmp_path / "f.yaml").write_text(f"distributed_type: FSDP\nnum_processes: 4\n{fsdp1}")
    launched = "accelerate launch --config_file f.yaml sft.py --model_name_or_path m --dataset_name d"
    run = get_values(import_file(tmp_path / "run.sh", launched))
    assert (run["zero_stage"], run["nproc_per_node"], run.get("offload")) == (3, 4, None)
    run = get_values(
        import_file(tmp_path / "c.yml", axolotl.replace("fsdp_version", "batch_size: 64\nmicro_batch_size"))
    )
    assert (run["per_device_train_batch_size"], run["gradient_accumulation_steps"]) == (2, 32)


@pytest.mark.parametrize(
    "words",
    [
        "--train_type full --freeze_llm true --freeze_vit false",
        "--freeze_llm true",
        "--freeze_llm true --freeze_vit true",
    ],
)
def test_what_trains_no_language_model_is_not_made_to(words: str) -> None:
    with pytest.raises(ConfigError, match=r"freeze_llm=True .*\[vision\]"):
        import_command(f"{SWIFT} {words}")


def test_values_that_make_no_run_are_left_out_with_their_reason() -> None:
    run = import_command(f"{SWIFT} --save_steps 0.1 --val_size 100")
    (save,) = [why for what, why in run.left_out.items() if what == "save_steps = 0.1"]
    assert "whole number" in save or "integer" in save
    assert "eval_fraction" not in run.settings
    assert any(what.startswith("val_size = 100") for what in run.left_out)
    with pytest.raises(ConfigError, match="tuning"):
        import_command(f"{SWIFT} --train_type longlora")


def test_secrets_are_not_repeated() -> None:
    run = import_command("swift sft --model m --dataset d --swanlab_token abcdef --hub_token ghijkl")
    assert not {"abcdef", "ghijkl"} & set(re.findall(r"\w+", run.as_yaml()))
    assert "swanlab_token = (not shown)" in run.unknown


def test_settings_of_an_engine_that_is_not_started_are_listed() -> None:
    grpo = "swift rlhf --rlhf_type grpo --model m --dataset d --reward_funcs accuracy --vllm_max_model_len 4096"
    for more in ("", " --use_vllm true --vllm_server_host 10.0.0.2"):
        assert "vllm_max_model_len = 4096" in import_command(grpo + more).left_out


@pytest.mark.parametrize("words", ["--columns '{text1'", "--lr_scheduler_kwargs '{0.1}'"])
def test_json_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="(columns|lr_scheduler_kwargs)=.* JSON"):
        import_command(f"{SWIFT} {words}")


def test_what_keeps_everything_keeps_everything(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    for words in ("swift sft --model m --dataset d", "swift sft --model m --dataset d --save_total_limit null"):
        text = import_command(words).as_yaml()
        assert "save_total_limit: null  #" in text
        (tmp_path / "run.yaml").write_text(text)
        assert load_config(tmp_path / "run.yaml").run.save_total_limit is None
    axolotl = import_file(
        tmp_path / "a.yaml", "base_model: m\ndatasets: [{path: d}]\ngradient_checkpointing: offload\n"
    )
    assert get_values(axolotl)["gradient_checkpointing"] is True


def test_options_of_axolotls_sources_that_are_the_default_here_are_no_loss(tmp_path: Path) -> None:
    source = "base_model: m\ndatasets:\n- path: d\n  type: chat_template\n  roles_to_train: [{}]\n  train_on_eos: {}\n"

    def left_out(role: str, end: str) -> list[str]:
        names = import_file(tmp_path / "a.yml", source.format(role, end)).left_out
        return [name.partition(" =")[0] for name in names if " of d" in name]

    assert left_out("assistant", "turn") == []
    assert left_out("user", "last") == ["roles_to_train", "train_on_eos"]


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("dpo", "model_name_or_path: m\ndataset_name: d\nmax_length: 512\nbeta: 0.1\nuse_peft: true\n"),
        ("dpo", "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nprecompute_ref_log_probs: true\n"),
        ("kto", "model_name_or_path: m\ndataset_name: d\ndesirable_weight: 1.5\nbeta: 0.1\n"),
        ("reward", "model_name_or_path: m\ndataset_name: d\ncenter_rewards_coefficient: 0.01\n"),
        ("reward", "base_model: m\ndatasets: [{path: d}]\nreward_model: true\n"),
        ("prm", "base_model: m\ndatasets: [{path: d}]\nprocess_reward_model: true\n"),
        ("diffusion", "base_model: m\ndatasets: [{path: d}]\ndiffusion: {eps: 0.1}\n"),
        ("dpo", "base_model: m\ndatasets: [{path: d}]\nrl: dpo\nreward_model: false\nadapter: lora\n"),
    ],
)
def test_a_file_of_another_method_does_not_become_sft(tmp_path: Path, method: str, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    run = parse_run(str(tmp_path / "run.yaml"))
    assert run.method == method
    assert get_values(convert(run))["method"] == method


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
@pytest.mark.parametrize("start", ["trl {}", "accelerate launch examples/{}.py", "python -m trl.scripts.{}"])
def test_commands_of_another_method_of_trl_are_known(start: str, method: str) -> None:
    run = import_command(f"{start.format(method)} --model_name_or_path m --dataset_name d --output_dir o --use_peft")
    assert get_values(run)["method"] == method


@pytest.mark.parametrize(
    "words",
    [
        "trl reward --model_name_or_path m --dataset_name d --use_peft --lora_task_type SEQ_CLS "
        "--lora_modules_to_save score --center_rewards_coefficient 0.1",
        "swift rlhf --rlhf_type rm --model m --dataset d --center_rewards_coefficient 0.1 --num_labels 1",
        "llamafactory-cli train --stage rm --model_name_or_path m --dataset d --finetuning_type lora",
    ],
)
def test_runs_of_reward_models_are_carried(words: str) -> None:
    run = import_command(words)
    values = get_values(run)
    assert values["method"] == "reward"
    assert values.get("center_rewards_coefficient") == (0.1 if "center" in words else None)
    assert "train_on" not in values
    assert not {name for name in run.left_out if "score" in name or "task" in name or "labels" in name}
    assert not run.unknown
    if words.startswith("trl"):
        assert (values["learning_rate"], values["truncation"]) == (1e-4, "drop")


@pytest.mark.parametrize(
    "words",
    [
        "trl sft --model_name_or_path m --dataset_name d --use_peft --lora_modules_to_save embed_tokens lm_head",
        "swift sft --model m --dataset d --modules_to_save embed_tokens lm_head",
        "llamafactory-cli train --model_name_or_path m --dataset d --finetuning_type lora "
        "--additional_target embed_tokens,lm_head",
    ],
)
def test_modules_that_are_trained_in_full_are_carried(words: str) -> None:
    run = import_command(words)
    assert get_values(run)["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert not {name for name in run.left_out if "modules" in name or "additional" in name}
    if "trl" in words:  # the head of a reward model is always trained
        for head in ("score", ""):
            scored = import_command(words.replace("trl sft", "trl reward").replace("lm_head", head))
            assert get_values(scored)["modules_to_save"] == ["embed_tokens"]


def test_parts_that_full_training_leaves_unchanged_are_carried_or_refused() -> None:
    start = "swift sft --model m --dataset d --train_type"
    carried = import_command(
        f"{start} full --freeze_parameters model.embed_tokens lm_head. --freeze_parameters_ratio 0"
    )
    assert get_values(carried)["freeze_modules"] == ["model.embed_tokens", "lm_head"]
    assert not any("freeze" in name for name in carried.left_out)
    for words in ("freeze_parameters model.layers.1", "freeze_parameters_ratio 0.5", "trainable_parameters lm_head"):
        with pytest.raises(ConfigError, match=r"freeze_layers and freeze_modules name what full fine-tuning leaves"):
            import_command(f"{start} full --{words}")
        assert any(words.split()[0] in name for name in import_command(f"{start} lora --{words}").left_out)
    with pytest.raises(ConfigError, match=r"finetuning_type='freeze', but expected lora or full: .*freeze_layers"):
        import_command("llamafactory-cli train --model_name_or_path m --dataset d --finetuning_type freeze")


@pytest.mark.parametrize("start", ["pissa_niter_16", "olora", "lora-ga"])
def test_starts_that_change_the_base_are_refused(start: str) -> None:
    with pytest.raises(ConfigError, match=f"init_weights='{start}', but expected true"):
        import_command(f"swift sft --model m --dataset d --init_weights {start}")
    assert get_values(import_command("swift sft --model m --dataset d --init_weights gaussian"))["tuning"] == "lora"


def test_groups_of_modules_of_swift_are_refused() -> None:
    with pytest.raises(ConfigError, match="modules_to_save='all-norm', but expected the names of modules"):
        import_command("swift sft --model m --dataset d --modules_to_save all-norm")


def test_a_reward_model_with_several_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_labels='?3'?, but expected 1"):
        import_command("swift rlhf --rlhf_type rm --model m --dataset d --num_labels 3")


@pytest.mark.parametrize(
    ("words", "functions", "weights"),
    [
        (f"{SWIFT_GRPO} --reward_funcs format --reward_model org/judge --reward_weights 0.5 2",
         [{"func": "regex", "args": {"pattern": r"\A<think>.*?</think>\s*<answer>.*?</answer>\Z"}}, "model:org/judge"],
         [0.5, 2]),
        ("trl grpo --model_name_or_path m --dataset_name d --reward_model_name_or_path org/judge "
         "--reward_funcs think_format_reward",
         ["model:org/judge",
          {"func": "regex", "args": {"pattern": r"\A<think>(?!.*<think>).*?</think>.*\Z"}}], None),
    ],
)  # fmt: skip
def test_reward_models_are_carried_beside_functions(
    words: str, functions: list[Any], weights: list[float] | None
) -> None:
    values = get_values(import_command(words))
    assert values["reward_funcs"] == functions
    assert values.get("reward_weights") == weights


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ("trl sft --model_name_or_path m --dataset_name d --loss_type dft", "dft"),
        (f"{SWIFT} --loss_type dft", "dft"),
        (f"{SWIFT_GRPO} --loss_type luspo", "luspo"),
        (f"{SWIFT} --loss_type a b", "['a', 'b']"),
    ],
)
def test_a_loss_that_is_not_here_is_refused(words: str, loss: str) -> None:
    with pytest.raises(ConfigError, match=r"loss_type=") as raised:
        import_command(words)
    assert loss in str(raised.value)


def test_a_script_of_another_program_that_is_called_like_one_of_trl_is_passed_over(tmp_path: Path) -> None:
    run = import_file(tmp_path / "run.sh", "python reward.py --port 8000 &\nswift sft --model m --dataset d")
    assert (run.source.program, run.source.method) == ("ms-swift", "sft")


@pytest.mark.parametrize(
    "names", ["model_class: llm", "peft_config: {name: lora, r: 16}", "dist_config: {name: fsdp2}"]
)
def test_the_next_configs_of_llamafactory_are_refused(tmp_path: Path, names: str) -> None:
    (tmp_path / "v1.yaml").write_text(f"model: m\ntrain_dataset: d.yaml\ntemplate: qwen3\ncutoff_len: 512\n{names}\n")
    for source in (str(tmp_path / "v1.yaml"), ["llamafactory-cli", "train", str(tmp_path / "v1.yaml")]):
        with pytest.raises(ConfigError, match="LLaMA-Factory v1"):
            parse_run(source)


def test_a_file_of_grpo_needs_no_command(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nuse_peft: true\nreward_funcs: [accuracy_reward]\n"
    assert get_values(import_file(tmp_path / "a.yaml", text))["method"] == "grpo"
    text = "model_name_or_path: m\ndatasets: [{path: p, name: main}]\nuse_peft: true\n"
    assert get_values(import_file(tmp_path / "b.yaml", text))["dataset"] == [{"path": "p", "subset": "main"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("NPROC_PER_NODE=0 swift sft --model m --dataset d", "nproc_per_node"),
        ("swift sft --model m --dataset d --per_device_train_batch_size 0", "per_device_train_batch_size = 0"),
        ("swift sft --model m --dataset d --lr_scheduler_type cosine linear", "lr_scheduler_type"),
        ("MAX_PIXELS=\u00b2 swift sft --model m --dataset d", "MAX_PIXELS=\u00b2"),
        ("accelerate launch --num_machines 3 --num_processes 16 sft.py --model_name_or_path m --dataset_name d",
         "--num_processes 16 .*--num_machines 3"),
    ],
)  # fmt: skip
def test_odd_numbers_are_refused_or_left_out_with_their_reason(words: str, said: str) -> None:
    try:
        told = import_command(words).as_yaml()
    except ConfigError as error:
        told = f"# {error}"
    assert any(re.search(said, line) for line in told.splitlines() if line.startswith("#")), told


def test_secrets_are_not_copied() -> None:
    run = import_command(f"{SWIFT} --hub_token hf_abc --swanlab_api_key 123 --eos_token x")
    launched = import_command("accelerate launch --wandb_api_key hf_abc sft.py --model_name_or_path m --dataset_name d")
    assert "hf_abc" not in run.as_yaml() + launched.as_yaml()
    assert "123" not in run.as_yaml()
    assert {"hub_token = (not shown)", "eos_token = x"} <= {*run.unknown, *run.left_out}


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ({"bf16": {"enabled": True}, "train_batch_size": 16}, True),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, True),
        ({"train_batch_size": 16, "output": 3}, False),
        ({}, False),
    ],
)
def test_deepspeed_files_are_known_by_their_names(tmp_path: Path, text: dict[str, Any], is_one: bool) -> None:
    if is_one:
        assert import_file(tmp_path / "ds.json", json.dumps(text)).program == "DeepSpeed"
    else:
        with pytest.raises(ConfigError, match=r"ds\.json: .*program"):
            import_file(tmp_path / "ds.json", json.dumps(text))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ds.json", '{"zero_optimization": "x"}', "deepspeed: "),
        ("run.yaml", "finetuning_type: lora\nmodel_name_or_path: &a [*a]\n", r"run\.yaml:2: .*alias"),
        ("run.yaml", "model_name_or_path: a/b\nfinetuning_type: oft\ndataset: c\n", r"\(finetuning_type, run.yaml:2\)"),
    ],
)
def test_files_that_make_no_run_say_where(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        import_file(tmp_path / name, text)


@pytest.mark.parametrize(
    ("text", "settings", "left_out"),
    [
        ("fsdp_config: {min_num_params: 0}", {}, "fsdp_config"),
        ("fsdp: full_shard\nfsdp_config: {offload_params: true}", {"zero_stage": 3, "offload": "cpu"}, None),
        ("fsdp: full_shard\nfsdp_config: fsdp.json", {"zero_stage": 3, "gradient_checkpointing": True}, None),
        ("fsdp: full_shard\nfsdp_config: nowhere.json", {"zero_stage": 3}, "fsdp_config"),
    ],
)
def test_fsdp_of_transformers(tmp_path: Path, text: str, settings: dict[str, Any], left_out: str | None) -> None:
    (tmp_path / "fsdp.json").write_text('{"activation_checkpointing": true}')
    run = import_file(tmp_path / "run.yaml", f"model_name_or_path: a/b\ndataset_name: c\n{text}\n")
    assert get_values(run).items() >= settings.items()
    assert ("zero_stage" in get_values(run)) == ("zero_stage" in settings)
    found = [one for one in run.left_out if one.startswith("fsdp_config")]
    assert bool(found) == (left_out is not None)


@pytest.mark.parametrize(("program", "level"), [("trl grpo --model_name_or_path", "dapo"), (SWIFT_GRPO, "gspo")])
def test_ratios_of_sequences_are_gspo_where_the_loss_is_that_of_grpo(program: str, level: str) -> None:
    words = f"{program} a/b --dataset_name c" if program.startswith("trl") else program
    run = import_command(f"{words} --importance_sampling_level sequence")
    assert get_values(run).get("loss_type", "dapo") == level
    assert any("importance_sampling_level" in one for one in run.left_out) == (level == "dapo")


def test_weights_of_rewards_are_carried_or_listed() -> None:
    start = "swift rlhf --rlhf_type grpo --model m --dataset a/b --reward_funcs accuracy format cosine --reward_weights"
    assert [one["weight"] for one in get_values(import_command(f"{start} 1 2 3"))["reward_funcs"]] == [1.0, 2.0, 3.0]
    assert any("reward_weights" in one for one in import_command(f"{start} 1 2").left_out)
    with pytest.raises(ConfigError, match="reward_weights"):
        import_command(f"{start} 1 x 2")


def test_a_server_that_is_named_by_its_address_is_to_be_vllms_own() -> None:
    words = "trl grpo --model_name_or_path m --dataset_name d --use_vllm true --vllm_mode server"
    run = import_command(f"{words} --vllm_server_base_url http://h:8000")
    assert get_values(run)["vllm_server"] == "http://h:8000"
    assert "`vllm serve`" in run.left_out["the server at http://h:8000"]
    assert not any(one.startswith("vllm_mode") for one in run.left_out)


def test_the_rloo_trainer_of_trl_is_grpo_with_its_loss_and_advantages(tmp_path: Path) -> None:
    words = "trl rloo --model_name_or_path m --dataset_name d --output_dir o --use_peft --reward_funcs accuracy_reward"
    expected = {
        "method": "grpo", "loss_type": "rloo", "advantage_estimator": "rloo", "scale_rewards": "none",
        "importance_correction": "none", "beta": 0.05, "kl_in_reward": True, "num_generations": 2,
        "learning_rate": 1e-6,
    }  # fmt: skip
    values = get_values(import_command(words))
    assert {name: values.get(name) for name in expected} == expected
    values = get_values(import_command(f"{words} --beta 0 --num_generations 4"))
    assert (values["beta"], values.get("kl_in_reward"), values["num_generations"]) == (0, None, 4)
    for option in ("--normalize_advantages true", "--reward_clip_range -1 1"):
        with pytest.raises(ConfigError, match=option.split()[0].removeprefix("--")):
            import_command(f"{words} {option}")
    text = "model_name_or_path: m\ndataset_name: d\nnum_generations: 4\nnormalize_advantages: true\n"
    with pytest.raises(ConfigError, match="advantages are not scaled over the batch"):
        import_file(tmp_path / "run.yaml", text)
