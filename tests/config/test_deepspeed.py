"""DeepSpeed configs as settings of ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import load_config
from surefoot.config.load import LoadedConfig
from surefoot.errors import ConfigError

MINIMAL = "model: m\ndataset: d.jsonl\noutput_dir: out\n"

ZERO3_OFFLOAD: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "total_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def load(folder: Path, deepspeed: Any, *overrides: str, text: str = "") -> LoadedConfig:
    if not isinstance(deepspeed, str):
        (folder / "ds.json").write_text(json.dumps(deepspeed))
        deepspeed = "ds.json"
    (folder / "run.yaml").write_text(f"deepspeed: {deepspeed}\n{MINIMAL}{text}")
    return load_config(folder / "run.yaml", overrides)


def test_what_means_the_same_is_mapped_and_the_rest_is_listed(tmp_path: Path) -> None:
    loaded = load(tmp_path, ZERO3_OFFLOAD)
    run = loaded.run
    assert (run.zero_stage, run.offload, run.max_grad_norm) == (3, "cpu", 0.5)
    assert (run.per_device_train_batch_size, run.global_batch_size) == (2, 16)
    assert (run.learning_rate, run.adam_beta1, run.adam_beta2, run.adam_epsilon) == (2e-5, 0.8, 0.95, 1e-6)
    assert (run.lr_scheduler_type, run.warmup_steps) == ("linear", 7)
    assert (run.dtype, run.weight_decay, run.gradient_accumulation_steps) == ("auto", 0.0, None)
    assert any("ds.json: zero_optimization.stage" in note and "zero_stage=3" in note for note in loaded.notes)
    left = " ".join(note for note in loaded.notes if not note.startswith("ds.json"))
    expected = {"loss_scale", "torch_adam", "pin_memory", "overlap_comm", "stage3_max_live_parameters"}
    assert {name for name in [*expected, "stage:", "offload_param", "wall_clock", "warmup"] if name in left} == {
        "torch_adam", "pin_memory", "overlap_comm", "stage3_max_live_parameters", "warmup",
    }  # fmt: skip
    assert "warmup_type" in left
    assert loaded.run.logging_steps == 1
    assert loaded.where("zero_stage") == "ds.json: zero_optimization.stage"


def test_float16_and_other_optimizers_are_listed_and_never_read_as_something_else(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"fp16": {"enabled": True}, "optimizer": {"type": "OneBitAdam"}, "xyz": {"a": 1}})
    assert loaded.run.dtype == "auto"
    left = " ".join(note for note in loaded.notes if not note.startswith("ds.json"))
    assert all(name in left for name in ("fp16.enabled: true", 'optimizer.type: "OneBitAdam"', "xyz.a: 1"))


def test_what_deepspeed_does_unless_told_otherwise_is_read_too(tmp_path: Path) -> None:
    linear = {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}}}
    loaded = load(tmp_path, linear)
    assert (loaded.run.lr_scheduler_type, loaded.run.warmup_steps) == ("cosine", 1000)
    assert not any("warmup_type" in note for note in loaded.notes)
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    assert load(tmp_path, off).run.dtype == "float32"
    adam = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": False}}}
    (left,) = load(tmp_path, adam).notes
    assert "adam_w_mode: false" in left
    assert "torch_adam" not in left


def test_equal_values_may_be_written_in_two_ways_and_notes_say_what_holds(tmp_path: Path) -> None:
    both = {"optimizer": {"params": {"lr": 1e-5}}, "zero_optimization": {"stage": 2}}
    loaded = load(tmp_path, both, "zero_stage=3", text="learning_rate: 1e-5\n")
    assert (loaded.run.learning_rate, loaded.run.zero_stage) == (1e-5, 3)
    assert loaded.notes == []


def test_accumulation_that_follows_from_the_other_sizes_does_not_contradict_them(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert load(tmp_path, sizes).run.global_batch_size == 16


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [("zero0", 0, None), ("zero2", 2, None), ("zero3", 3, None), ("zero3_offload", 3, "cpu")],
)
def test_presets_of_ms_swift(tmp_path: Path, name: str, stage: int, offload: str | None) -> None:
    run = load(tmp_path, name).run
    assert (run.zero_stage, run.offload) == (stage, offload)


def test_the_command_line_wins_over_the_json_and_the_json_over_the_file(tmp_path: Path) -> None:
    stage = {"zero_optimization": {"stage": 1}}
    assert load(tmp_path, stage, "zero_stage=3").run.zero_stage == 3
    (tmp_path / "other.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    assert load(tmp_path, stage, f"deepspeed={tmp_path / 'other.json'}").run.zero_stage == 0
    assert load(tmp_path, stage, text="zero_stage: 1\n").run.zero_stage == 1


@pytest.mark.parametrize(
    ("deepspeed", "text", "message"),
    [
        ("missing.json", "", r"missing\.json: .*zero2.*\(run\.yaml:1\)"),
        (
            {"zero_optimization": {"stage": 1}},
            "zero_stage: 2\n",
            r"zero_stage.* 2 \(run\.yaml:5\).* 1 \(ds\.json: zero_opt",
        ),
        ({"zero_optimization": {"stage": 7}}, "", r"zero_stage=7: .*\(ds\.json: zero_optimization\.stage\)"),
        (
            {"optimizer": {"params": {"lr": 1e-4}}, "scheduler": {"params": {"warmup_max_lr": 2e-4}}},
            "",
            r"learning_rate .*0\.0001 .*0\.0002, .*optimizer\.params\.lr .*scheduler\.params\.warmup_max_lr",
        ),
        ([1], "", r"deepspeed: .* \[1\] \("),
        ("7", "", r"deepspeed: .* 7 \(run\.yaml:1\)"),
    ],
)  # fmt: skip
def test_bad_deepspeed_configs_say_what_and_where(tmp_path: Path, deepspeed: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, deepspeed, text=text)


def test_what_would_train_differently_is_told_from_what_is_only_about_speed(tmp_path: Path) -> None:
    given = {
        "optimizer": {"type": "OneBitAdam"},
        "scheduler": {"type": [1]},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "allgather_bucket_size": 5e8},
    }
    loud, quiet = (note for note in load(tmp_path, given).notes if not note.startswith("ds.json"))
    assert "train" in loud
    assert "OneBitAdam" in loud
    assert "scheduler.type: [1]" in loud
    assert '"nvme"' in loud
    assert "allgather_bucket_size" in quiet
    assert "nvme" not in quiet


def test_batch_sizes_that_no_number_of_ranks_makes_agree_are_refused(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match=r"train_batch_size=16 .*=3 x .*=2 = 6.*\(ds\.json\)"):
        load(tmp_path, sizes)


def test_a_json_on_the_command_line_says_what_it_replaces(tmp_path: Path) -> None:
    (tmp_path / "later.json").write_text('{"zero_optimization": {"stage": 3}}')
    loaded = load(tmp_path, {}, f"deepspeed={tmp_path / 'later.json'}", text="zero_stage: 1\n")
    assert loaded.run.zero_stage == 3
    assert any("zero_stage=3" in note and "zero_stage=1 of run.yaml:5" in note for note in loaded.notes)


def test_json_that_is_broken_says_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"a": 1,\n]')
    with pytest.raises(ConfigError, match=r"broken\.json:2: .*\(run\.yaml:1\)"):
        load(tmp_path, "broken.json")


def test_a_later_config_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert load(tmp_path, "not-there.json", "deepspeed=null").run.zero_stage == 2, "as where nothing is said"
    run = load(tmp_path, ZERO3_OFFLOAD, f"deepspeed={tmp_path}/other.json").run
    assert (run.zero_stage, run.offload, run.max_grad_norm, run.adam_beta1) == (1, None, 1.0, 0.9)
