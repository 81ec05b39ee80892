"""The JSON schema of run.yaml: editors complete and check by it what `load_config` reads."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from surefoot.config import load_config
from surefoot.config.aliases import ALIASES, FLAG_ALIASES
from surefoot.config.describe import describe_settings, run_schema
from surefoot.config.methods import BUILT_IN, known_fields
from surefoot.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/**/*.yaml"))
BASE = {"model": "m", "dataset": "d.jsonl", "output_dir": "o"}
VALIDATOR = jsonschema.Draft202012Validator(run_schema())


def test_the_committed_schema_is_the_one_of_the_code() -> None:
    assert json.loads((ROOT / "docs/run.schema.json").read_text()) == run_schema(), "surefoot settings --schema"
    jsonschema.Draft202012Validator.check_schema(run_schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_point_to_the_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert (path.parent / first.partition("$schema=")[2]).resolve() == ROOT / "docs/run.schema.json"
    assert not list(VALIDATOR.iter_errors(yaml.safe_load(path.read_text())))


def test_every_name_that_is_read_is_in_it() -> None:
    assert set(run_schema()["properties"]) >= {*known_fields(), *ALIASES, *FLAG_ALIASES, "deepspeed"}


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": ["a.jsonl", {"path": "b.jsonl", "weight": 2}]},
        {"dataset": {"path": "a.jsonl"}},
        {"learning_rate": "1e-4", "lora_r": 8, "target_modules": "all-linear"},
        {"learning_rate": None, "report_to": "none", "resume_from_checkpoint": False},
        {"report_to": ["wandb"], "dtype": "bf16", "zero_stage": 3, "expert_parallel_size": "auto"},
        {"method": "grpo", "reward_funcs": "length", "num_generations": 4, "global_batch_size": 4},
        {"method": "grpo", "reward_funcs": [{"func": "length", "weight": 1}], "scale_rewards": False, "stop": "\n"},
        {"method": "dpo", "loss_type": "ipo", "beta": 0.2},
        {"method": "dpo", "loss_type": ["sigmoid", "hinge"], "loss_weights": [1, 0.5]},
        {"phase_timeout_s": {"save": 900}, "bf16": True},
        {"fp16": False, "tensor_parallel_size": False},
    ],
)
def test_it_accepts_what_is_read(changes: dict[str, Any]) -> None:
    load_config(None, (), {**BASE, **changes})
    assert not list(VALIDATOR.iter_errors({**BASE, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rnk": 8},
        {"lora_rank": "many"},
        {"lora_rank": 0},
        {"method": "ppo"},
        {"dataset": {"path": "a", "wieght": 2}},
        {"packing": 1},
        {"zero_stage": 4},
        {"reward_funcs": [{"func": 3}]},
    ],
)
def test_it_refuses_what_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_config(None, (), {**BASE, **changes})
    assert list(VALIDATOR.iter_errors({**BASE, **changes}))


def test_what_must_be_set_may_have_the_name_of_another_program() -> None:
    VALIDATOR.validate({"model_name_or_path": "m", "train_file": "d.jsonl", "output_dir": "o"})
    assert list(VALIDATOR.iter_errors({"dataset": "d.jsonl", "output_dir": "o"}))


def test_each_setting_is_described_with_the_methods_that_have_it() -> None:
    described = describe_settings()
    assert {key.partition(" (")[0] for key in described} == set(known_fields())
    assert all(about["description"] for about in described.values())
    assert described["method"]["enum"] == list(BUILT_IN)
    assert "methods" not in described["lora_rank"]
    assert described["num_generations"]["methods"] == ["grpo"]
    assert described["beta"]["methods"] == ["grpo"]
    assert described["beta (dpo, kto, orpo)"]["methods"] == ["dpo", "kto", "orpo"]
    assert described["beta (dpo, kto, orpo)"]["default"] == 0.1
