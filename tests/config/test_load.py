"""Reading a config: places, aliases, suggestions, overrides and contradictions."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot.config import DatasetItem, RunConfig, as_yaml, changed_fields, known_fields, load_config, read_saved
from surefoot.config.aliases import ALIASES
from surefoot.errors import ConfigError

PATH_DESCRIPTION = re.escape(str(DatasetItem.model_fields["path"].description))
BASE = "model: some/model\ndataset: train.jsonl\noutput_dir: out\n"


def load(tmp_path: Path, text: str, *overrides: str, **values: Any) -> RunConfig:
    (tmp_path / "run.yaml").write_text(BASE + text)
    return load_config(tmp_path / "run.yaml", overrides, values).run


def test_every_field_has_a_docstring() -> None:
    assert all(field.description for field in known_fields().values())


def test_aliases_lead_to_fields_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(known_fields())
    assert not set(ALIASES) & set(known_fields())


def test_file_then_overrides_then_arguments(tmp_path: Path) -> None:
    run = load(tmp_path, "learning_rate: 1e-4\nseed: 1\nmax_steps: 1\n", "seed=2", "max_steps=2", max_steps=3)
    assert (run.learning_rate, run.seed, run.max_steps) == (1e-4, 2, 3)
    assert load(tmp_path, 'max_steps: "5"\n').max_steps == 5


def test_all_contradictions_are_told_at_once(tmp_path: Path) -> None:
    """But for what only follows from one: LoRA's targets say nothing of a run that has no LoRA."""
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "tuning: full\nlora_rank: 4\ntarget_modules: []\nmax_steps: 3\nnum_train_epochs: 2\n")
    head, full, length = str(refused.value).splitlines()
    assert head.startswith("2 ")
    assert full.startswith("- tuning=full ")
    assert "lora_rank, target_modules" in full
    assert full.endswith("(run.yaml:5, run.yaml:6).")
    assert length.startswith("- max_steps ")
    assert "num_train_epochs" in length
    assert length.endswith("(run.yaml:7, run.yaml:8).")


def test_paths_are_relative_to_the_file_and_overrides_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = load(tmp_path, "eval_dataset: [a.jsonl, ../b.jsonl]\n", "output_dir=here")
    assert run.dataset == [DatasetItem(path=str(tmp_path / "train.jsonl"))]
    assert run.eval_dataset is not None
    assert [item.path for item in run.eval_dataset] == [str(tmp_path / "a.jsonl"), str(tmp_path.parent / "b.jsonl")]
    assert run.output_dir == str(tmp_path / "elsewhere" / "here")
    assert run.model == "some/model", "a hub id is no path"


def test_environment_variables_in_paths_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_TEST", str(tmp_path / "scratch"))
    settings = [
        "model=$SCRATCH_OF_TEST/model",
        "dataset=[{path: $SCRATCH_OF_TEST/a.jsonl}, '${SCRATCH_OF_TEST}/b.jsonl']",
        "output_dir=$SCRATCH_OF_TEST/$SCRATCH_OF_TEST",
    ]
    run = load(tmp_path, "", *settings)
    assert run.model == str(tmp_path / "scratch/model")
    assert [item.path for item in run.dataset] == [str(tmp_path / "scratch" / name) for name in ("a.jsonl", "b.jsonl")]
    assert run.output_dir == f"{tmp_path}/scratch{tmp_path}/scratch"
    for name in ("model", "dataset", "output_dir", "chat_template", "resume_from_checkpoint"):
        with pytest.raises(ConfigError, match=rf"{name}=.*\bUNSET_OF_TEST\b.*\(command line\)"):
            load(tmp_path, "", f"{name}=${{UNSET_OF_TEST}}/x")


def test_a_model_folder_beside_the_file_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert load(tmp_path, "").model == str(tmp_path / "some" / "model")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("lora_r: 4\n", "lora_rank", 4),
        ("cutoff_len: 99\n", "max_length", 99),
        ("sample_packing: true\n", "packing", True),
        ("micro_batch_size: 2\n", "per_device_train_batch_size", 2),
        ("finetuning_type: full\n", "tuning", "full"),
        ("lora_target: [q_proj]\n", "target_modules", ["q_proj"]),
        ("target_modules: '.*layers.[0-9]{1,2}.*(q, v)'\n", "target_modules", ".*layers.[0-9]{1,2}.*(q, v)"),
        ("target_modules: all-linear\n", "target_modules", "all"),
        ("bf16: true\n", "dtype", "bfloat16"),
        ("fp16: false\n", "dtype", "auto"),
        ("train_on_prompt: true\n", "train_on", "all"),
        ("mask_history: true\n", "train_on", "last_assistant"),
        ("train_on_inputs: false\n", "train_on", "assistant"),
        ("val_size: 0.1\n", "eval_fraction", 0.1),
        ("torch_dtype: fp32\n", "dtype", "float32"),
        ("report_to: none\n", "report_to", []),
        ("report_to: tensorboard\n", "report_to", ["tensorboard"]),
        ("resume_from_checkpoint: true\n", "resume_from_checkpoint", "auto"),
        ("resume_from_checkpoint: never\n", "resume_from_checkpoint", False),
    ],
)
def test_peers_names_and_values(tmp_path: Path, text: str, field: str, value: Any) -> None:
    assert getattr(load(tmp_path, text), field) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "stage: sft\ndo_train: true\nlearning_rte: 1\n",
            r"(?s) surefoot import --to NEW\.yaml .*run\.yaml.*'stage' \(run\.yaml:4\).*'do_train' \(run\.yaml:5\)"
            r".*'learning_rte'.* 'learning_rate'\? \(run\.yaml:6\)",
        ),
        ("learning_rte: 1\n", r"'learning_rte'.*'learning_rate'.*\(run\.yaml:4\)"),
        ("\n\nsequence_length: 3\n", r"'sequence_length'.*'max_length'.*\(run\.yaml:6\)"),
        ("xyzzy: 1\n", r"'xyzzy'.*`surefoot settings`.*\(run\.yaml:4\)"),
        ("max_steps: many\n", r"max_steps='many': .*integer.*\(run\.yaml:4\)"),
        ("max_steps: 0\n", r"max_steps=0: must .* 0 \(run\.yaml:4\)"),
        ("lora_rank: -8\n", r"lora_rank=-8: .* 0 \(run\.yaml:4\)"),
        ("max_length: 0\n", r"max_length=0"),
        ("max_length: 1099511627776\n", r"max_length=1099511627776: .*\(run\.yaml:4\)"),
        ("dataset_num_proc: 100000\n", r"dataset_num_proc=100000: .*\(run\.yaml:4\)"),
        ("lora_rank: 1000000000\n", r"lora_rank=1000000000: .*\(run\.yaml:4\)"),
        ("lora_alpha: 1.0e+308\n", r"lora_alpha=1e\+308: .*\(run\.yaml:4\)"),
        ("chat_template_date: '2024-02-30'\n", r"chat_template_date='2024-02-30': .*\(run\.yaml:4\)"),
        ("chat_template_date: '\u0662\u0660\u0662\u0664-01-01'\n", r"chat_template_date=.*\(run\.yaml:4\)"),
        ("learning_rate: .nan\n", r"learning_rate=nan"),
        ("packing: 1\n", r"packing=1: .*boolean"),
        ("method: prm\n", r"method='prm': .*'sft'"),
        ("method: ppo\n", r"method='ppo': there is no PPO here. `method: grpo`"),
        ("method: simpo\n", r"method='simpo': write `method: dpo` with `loss_type: simpo`"),
        ("model: other\n", r"'model' .*some/model \(run\.yaml:1\).* other \(run\.yaml:4\)"),
        (
            "base_model: other\n",
            r"'model' .*some/model \(run\.yaml:1\).* other .*'base_model' \(run\.yaml:4\)",
        ),
        ("nproc_per_node: 0\n", r"nproc_per_node=0: .* 0 \(run\.yaml:4\)"),
        ("tensor_parallel_size: 2\n", r"'tensor_parallel_size': .*zero_stage: 3"),
        ("fp16: true\n", r"'fp16': .*bf16: true.*\(run\.yaml:4\)"),
        ("nnodes: 2\n", r"nnodes=2 .*rdzv_endpoint.*node0:29500 \(run\.yaml:4\)"),
        ("rdzv_endpoint: node0\n", r"rdzv_endpoint=node0 .*host:port"),
        (
            "rdzv_endpoint: node0:99999\n",
            r"rdzv_endpoint=node0:99999 .*65535.*\(run\.yaml:4\)",
        ),
        ("a: [1\n", r"run\.yaml:4: .*YAML"),
    ],
)
def test_bad_values_say_what_and_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "global_batch_size: 8\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 2\n",
            r"global_batch_size=8 .*=2 x .*=2 x 1 .*= 4.*\(run\.yaml:4, run\.yaml:6\)",
        ),
        ("tuning: full\nlora_rank: 16\n", r"tuning=full .*lora_rank .*\(run\.yaml:5\)"),
        (
            "lora_dropout: 0.1\ntarget_modules: [attention, experts]\n",
            r"lora_dropout=0\.1 .*experts.*\(run\.yaml:4, run\.yaml:5\)",
        ),
        ("warmup_steps: 3\nwarmup_ratio: 0.1\n", r"warmup_steps .*warmup_ratio .*\(run\.yaml:4, run\.yaml:5\)"),
        ("max_steps: 3\nnum_train_epochs: 1\n", r"max_steps .*num_train_epochs .*\(run\.yaml:4, run\.yaml:5\)"),
        ("eval_steps: 5\n", r"eval_steps=5 .*eval_dataset .*eval_fraction"),
        ("truncation: split\n", r"set train_on: all, with method: sft"),
        ("truncation: split\ntrain_on: all\nmethod: orpo\n", r"set train_on: all, with method: sft"),
        ("evals_per_epoch: 2\n", r"evals_per_epoch=2 .*eval_dataset .*eval_fraction"),
        ("saves_per_epoch: 2\nsave_steps: 50\n", r"save_steps and saves_per_epoch set the same. Keep one"),
        ("eval_fraction: 0.1\neval_steps: 5\nevals_per_epoch: 1\n", r"eval_steps and evals_per_epoch set the same"),
        ("target_modules: []\n", "target_modules .*empty"),
        ("target_modules: '.*(q_proj'\n", r"target_modules=.*unterminated.*\(.*run\.yaml:\d+\)"),
        (
            "overwrite_output_dir: true\nresume_from_checkpoint: some/step\n",
            r"overwrite_output_dir .*resume_from_checkpoint .*\(run\.yaml:4, run\.yaml:5\)",
        ),
        ("chat_template_kwargs: {date: 2024-01-01}\n", r"run\.yaml:4: 2024-01-01 .*date"),
        ("chat_template_kwargs: {code: !!binary aGVsbG8=}\n", r"chat_template_kwargs=.*JSON.*\(run\.yaml:4\)"),
        ("chat_template_kwargs: {tools: {1: a}}\n", r"chat_template_kwargs=.*JSON.*\(run\.yaml:4\)"),
        ("decay_ratio: 0.2\n", "no effect with lr_scheduler_type=cosine"),
        ("min_lr_ratio: 0.2\nlr_scheduler_type: constant\n", "no effect with lr_scheduler_type=constant"),
        ("lr_scheduler_type: wsd\nwarmup_ratio: 0.95\n", "more than the whole run"),
    ],
)
def test_contradictions_are_refused_before_anything_loads(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_an_override_takes_the_place_of_its_rival_in_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "num_train_epochs: 3\n", max_steps=10).num_train_epochs is None
    run = load(tmp_path, "max_steps: 10\nwarmup_ratio: 0.1\n", "num_train_epochs=1", "warmup_steps=2")
    assert (run.max_steps, run.epochs, run.warmup_ratio, run.warmup_steps) == (None, 1.0, 0.0, 2)
    with pytest.raises(ConfigError, match=r"max_steps .*num_train_epochs .*\(command line\)"):
        load(tmp_path, "", "max_steps=3", "num_train_epochs=2")


def test_null_takes_a_setting_back_to_its_default(tmp_path: Path) -> None:
    run = load(tmp_path, "target_modules: [q_proj]\nmax_steps: 3\n", "tuning=full", "target_modules=null")
    assert (run.tuning, run.target_modules, run.max_steps) == ("full", "all", 3)
    assert load(tmp_path, "max_steps: 3\n", "max_steps=null", "num_train_epochs=2").epochs == 2.0


def test_a_setting_of_several_types_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "dataset_path: 3\n".replace("dataset_path", "eval_dataset"))
    assert str(caught.value).count("eval_dataset[0] ") == 1
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/name", {"path": "org/name"}),
        ("data/train.jsonl", {"path": "BASE/data/train.jsonl"}),
        ("{path: data, weight: 2, split: 'train[:10%]'}", {"path": "BASE/data", "weight": 2.0, "split": "train[:10%]"}),
        ("[{path: 'data/*.json', columns: {query: q}}]", {"path": "BASE/data/*.json", "columns": {"query": "q"}}),
        ("info/dataset_info.json:demo", {"path": "BASE/info/dataset_info.json:demo"}),
    ],
)
def test_a_dataset_in_any_of_its_forms(tmp_path: Path, text: str, wanted: dict[str, Any]) -> None:
    (item,) = load(tmp_path, f"eval_dataset: {text}\n").eval_dataset or []
    assert item == DatasetItem(**{**wanted, "path": wanted["path"].replace("BASE", str(tmp_path))})


def test_llamafactorys_names_are_looked_up_in_dataset_dir(tmp_path: Path) -> None:
    run = load(tmp_path, "dataset_dir: data\n", "dataset=a, b")
    assert [(item.path, item.name) for item in run.dataset] == [
        (str(tmp_path / "data" / "dataset_info.json"), name) for name in "ab"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset_format: dolly\n", r"dataset_format='dolly': .*'auto', 'messages'"),
        ("eval_dataset: {path: a, weigth: 2}\n", r"eval_dataset\[0\]\.weigth: .*'weight'"),
        ("eval_dataset: {path: a, weight: 0}\n", r"eval_dataset\[0\]\.weight: .* 0, .* 0(\.0)? \("),
        ("eval_dataset: {weight: 1}\n", rf"eval_dataset\[0\]\.path .*missing.*{PATH_DESCRIPTION}"),
        ("eval_dataset: ''\n", r"eval_dataset\[0\]\.path .*empty"),
        ("eval_dataset: [3]\n", r"eval_dataset\[0\] .*\{path, .* 3 \("),
        ("eval_dataset: []\n", r"eval_dataset=\[\]: .* 1 item"),
        ("eval_dataset: a\neval_fraction: 0.1\n", r"eval_dataset .*eval_fraction .*\(run\.yaml:4, run\.yaml:5\)"),
        ("eval_fraction: 1\n", r"eval_fraction=1: .* 1 \("),
        (
            "enable_thinking: true\nchat_template_kwargs: {enable_thinking: false}\n",
            r"enable_thinking .*chat_template_kwargs.*\(run\.yaml:4, run\.yaml:5\)",
        ),
        ("bf16: false\n", r"bf16=false .*dtype.*\(run\.yaml:4\)"),
    ],
)
def test_wrong_data_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\n")
    with pytest.raises(ConfigError, match=r"'dataset' .*missing(.|\n)*'output_dir' .*missing"):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: "):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"run\.yaml .*empty"):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: .*sequence"):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: .*UTF-8"):
        load_config(tmp_path / "run.yaml")


def test_the_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    for text in ("lora_r: 4\nreport_to: [tensorboard]\nlearning_rate: 5e-5\nmax_steps: 3\n", "tuning: full\n"):
        run = load(tmp_path, text)
        (tmp_path / "again.yaml").write_text(as_yaml(run))
        assert load_config(tmp_path / "again.yaml").run == run


def test_changed_fields_are_those_that_enter_the_numbers(tmp_path: Path) -> None:
    run = load(tmp_path, "global_batch_size: 8\nlearning_rate: 1e-4\n")
    saved = yaml.safe_load(as_yaml(run))
    assert changed_fields(saved, run) == []
    same = run.model_copy(update={"save_steps": 7, "per_device_train_batch_size": 1, "logging_steps": 3})
    assert changed_fields(saved, same) == []
    other = run.model_copy(update={"learning_rate": 0.5, "global_batch_size": 4})
    rate, sequences = changed_fields(saved, other)
    assert rate == "learning_rate: 0.0001 -> 0.5"
    assert ": 8 -> 4 " in sequences
    assert "global_batch_size: 8" in sequences


@pytest.mark.parametrize(
    ("text", "planned"),
    [
        ("max_steps: 250\n", 3),
        ("max_steps: 100\n", 1),
        ("num_train_epochs: 2\n", None),
        ("save_steps: 0\n", 0),
        ("num_train_epochs: 2.5\nsaves_per_epoch: 2\n", 5),
        ("num_train_epochs: 0.4\nsaves_per_epoch: 1\n", 1),
        ("max_steps: 100\nsaves_per_epoch: 1\n", None),
    ],
)
def test_the_number_of_checkpoints_follows_from_the_length_of_a_run(
    tmp_path: Path, text: str, planned: int | None
) -> None:
    assert load(tmp_path, text).planned_checkpoints == planned


def test_parts_of_an_epoch_end_in_the_step_that_reaches_them(tmp_path: Path) -> None:
    run = load(tmp_path, "saves_per_epoch: 4\n")
    ends = [number / 10 for number in range(31)]  # ten steps an epoch
    saved = [step for step in range(1, 31) if run.saves_after(step, ends[step - 1], ends[step])]
    assert saved == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30]
    run = load(tmp_path, "")
    assert [step for step in range(1, 301) if run.saves_after(step, 0.0, 0.1)] == [100, 200, 300]


def test_changes_are_told_down_to_a_single_value(tmp_path: Path) -> None:
    saved = yaml.safe_load(
        as_yaml(load(tmp_path, "", dataset=[{"path": "a", "columns": {"query": "q"}}, {"path": "b"}]))
    )
    run = load(tmp_path, "", dataset=[{"path": "a", "columns": {"query": "p"}}, {"path": "b", "weight": 2}])
    assert changed_fields(saved, run) == ["dataset[0].columns.query: q -> p", "dataset[1].weight: 1.0 -> 2.0"]
    run = load(tmp_path, "", dataset=[{"path": "a"}])
    assert [change.partition(":")[0] for change in changed_fields(saved, run)] == ["dataset"]


def test_a_constant_schedule_may_be_extended(tmp_path: Path) -> None:
    for schedule, changes in (("constant", 0), ("cosine", 1)):
        run = load(tmp_path, f"lr_scheduler_type: {schedule}\nmax_steps: 5\n")
        longer = run.model_copy(update={"max_steps": 9})
        assert len(changed_fields(yaml.safe_load(as_yaml(run)), longer)) == changes


def test_paths_in_a_config_from_a_pipe_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    end, begin = os.pipe()
    os.write(begin, b"model: ./m\ndataset: d.jsonl\noutput_dir: out\n")
    os.close(begin)
    run = load_config(f"/dev/fd/{end}").run
    os.close(end)
    assert run.output_dir == str(tmp_path / "out")
    assert run.dataset[0].path == str(tmp_path / "d.jsonl")


@pytest.mark.parametrize("text", ["q_proj,v_proj", "q_proj v_proj", "q_proj, v_proj"])
def test_names_in_one_text_are_a_list(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"lora_target: {text}\n").target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_samples: 10", "split: '[:1000]'"),
        ("bnb_4bit_quant_type: fp4", "quantization: nf4"),
        ("template: qwen", "chat_template"),
        ("save_strategy: steps", "saves_per_epoch: 1 saves after each pass"),
    ],
)
def test_settings_of_others_that_are_none_here_say_what_to_do(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{line.partition(':')[0]}' \(run\.yaml:4\): ") as caught:
        load(tmp_path, f"{line}\n")
    assert said in str(caught.value)


def test_a_resolved_config_of_an_older_version_is_read(tmp_path: Path) -> None:
    """It names the settings of all methods, those of others with their defaults."""
    run = load(tmp_path, "lora_rank: 4\n")
    old = {name: field.default for name, field in known_fields().items() if name not in type(run).model_fields}
    assert old["num_generations"] == 8
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({**run.model_dump(mode="json"), **old}))
    assert load_config(tmp_path / "old.yaml").run == run
    assert read_saved({**run.model_dump(mode="json"), **old, "temperature": 0.5}) == run
    assert not changed_fields({**run.model_dump(mode="json"), **old}, run)


def test_a_setting_of_another_method_is_refused_with_that_method(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beta, num_generations is a setting of method grpo.*sft.*:4, run\.yaml:5"):
        load(tmp_path, "num_generations: 4\nbeta: 0.1\n")
    assert load(tmp_path, "num_generations: 8\nbeta: 0\n").method == "sft"


def test_reading_a_config_of_any_method_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE + "method: grpo\nreward_funcs: [length]\nglobal_batch_size: 8\n")
    program = (
        "import sys; from surefoot.config import load_config; load_config(sys.argv[1]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "run.yaml"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [float("-inf")]])
def test_no_number_inside_free_settings_is_infinite(value: Any) -> None:
    """It would be null where the run folder and the ranks read it."""
    base = {"model": "m", "dataset": "d.jsonl", "output_dir": "o"}
    with pytest.raises(ConfigError, match="chat_template_kwargs="):
        load_config(None, (), {**base, "chat_template_kwargs": {"a": value}})
    grpo = {**base, "method": "grpo", "global_batch_size": 8}
    with pytest.raises(ConfigError, match="reward_funcs="):
        load_config(None, (), {**grpo, "reward_funcs": [{"func": "length", "args": {"limit": value}}]})


@pytest.mark.parametrize("text", ["max_length: '99999999999999999999'\n", "seed: '99999999999999999999'\n"])
def test_an_integer_in_quotes_has_the_same_bound(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"67 bits; 63 .*\(run\.yaml:4\)"):
        load(tmp_path, text)


@pytest.mark.parametrize("value", ["0x" + "f" * 5000, "[grpo]", "{a: 1}", "3"])
@pytest.mark.parametrize("key", ["method", "rlhf_type"])
def test_a_method_of_any_form_is_refused_with_its_line(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml:4") as refused:
        load(tmp_path, f"{key}: {value}\n")
    assert len(str(refused.value)) < 400


def test_null_is_the_default_method(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE + "method: grpo\n")
    assert load_config(tmp_path / "run.yaml", ["method=null"]).run.method == "sft"
    assert read_saved({"model": "m", "dataset": [{"path": "d"}], "output_dir": "o", "method": None}).method == "sft"


def test_a_saved_config_with_a_key_that_is_no_text_is_none() -> None:
    with pytest.raises(ValueError, match="no text"):
        read_saved({"model": "m", True: "true"})  # type: ignore[dict-item]


def test_phases_are_known_by_their_former_names_too(tmp_path: Path) -> None:
    run = load(tmp_path, "phase_timeout_s: {wait for data: 5, communicate: 6, tokenise: 7, save: 8}\n")
    assert run.phase_timeout_s == {"data_wait": 5, "collectives": 6, "tokenize": 7, "save": 8}


def test_first_mistakes_are_told_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\noutput_dir: o\n")
    with pytest.raises(ConfigError, match=r"^'dataset' is missing in run\.yaml\. "):
        load_config(file)
    with pytest.raises(ConfigError, match=r"^'dataset' is missing\. "):
        load_config(None, ["model=m", "output_dir=o"])
    with pytest.raises(ConfigError, match=r"model=m: no such file\. Settings follow a file: run\.yaml key=value"):
        load_config("model=m")
    file.write_text("model: m\ndataset: d\noutput_dir: o\nswanlab_project: p\n")
    with pytest.raises(ConfigError, match=r"'swanlab_project' \(run\.yaml:4\): a tracker .* SWANLAB_PROJECT"):
        load_config(file)


def test_a_setting_of_several_other_methods_is_refused_without_choosing_one() -> None:
    with pytest.raises(ConfigError, match=r"loss_type is a setting of method grpo or dpo or kto.* orpo\. Drop it, or"):
        load_config(None, ["model=m", "dataset=d", "output_dir=o", "method=orpo", "loss_type=orpo"])
