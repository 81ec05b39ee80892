"""A reference that is not the model without its adapter: computed before the first step, kept and used again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

import surefoot
from surefoot.errors import CheckpointError
from surefoot.system.atomic_io import cache_folder
from tests.methods.test_dpo import pair_rows
from tests.methods.test_kto import labelled_rows
from tests.support.data import write_jsonl
from tests.support.processes import surefoot as command
from tests.support.runs import numbers

TRAINED = ("loss", "grad_norm", "rewards/margins", "rewards/chosen")


@pytest.fixture
def run(model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return {
        "method": "dpo", "model": str(model_folder("qwen2_moe")), "tuning": "full",
        "dataset": str(write_jsonl(tmp_path / "pairs.jsonl", pair_rows(20))), "eval_fraction": 0.2,
        "output_dir": str(tmp_path / "run"), "max_length": 128, "max_steps": 4, "global_batch_size": 5,
        "per_device_train_batch_size": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "device": "cpu", "report": False,
    }  # fmt: skip


def stored() -> list[Path]:
    return sorted((cache_folder() / "references").glob("*.safetensors"))


def steps(folder: Path) -> list[list[float]]:
    return [[line[name] for name in TRAINED] for line in numbers(folder) if "loss" in line]


@pytest.mark.slow
def test_full_fine_tuning_begins_at_its_reference_and_leaves_it(run: dict[str, Any]) -> None:
    result = surefoot.train({**run, "max_steps": 10}, screen=False)
    lines = [line for line in numbers(result.run_folder) if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert lines[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["rewards/margins"] > 0.1
    assert result.evaluation["eval_rewards/margins"] > 0


@pytest.mark.slow
def test_a_stored_reference_gives_what_the_model_without_its_adapter_does(run: dict[str, Any], tmp_path: Path) -> None:
    lora = {**run, "tuning": "lora", "lora_rank": 4}
    surefoot.train(lora, screen=False)
    assert not stored()
    surefoot.train({**lora, "precompute_ref_log_probs": True, "output_dir": str(tmp_path / "stored")}, screen=False)
    assert stored()
    for line, same in zip(steps(tmp_path / "run"), steps(tmp_path / "stored"), strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_only_what_the_run_visits_is_computed_and_a_longer_run_adds_the_rest(run: dict[str, Any]) -> None:
    short = {**run, "eval_fraction": 0.0, "max_steps": 2}
    surefoot.train(short, screen=False)
    (path,) = stored()
    first = load_file(path)["logps"]
    assert int(first.isfinite().all(1).sum()) == 10
    surefoot.train({**short, "max_steps": 4}, screen=False)
    assert stored() == [path]
    both = load_file(path)["logps"]
    assert both.isfinite().all()
    assert both[first.isfinite()].equal(first[first.isfinite()])


@pytest.mark.slow
@pytest.mark.parametrize("keeps_cache", [pytest.param(True, marks=pytest.mark.long), False], ids=["kept", "lost"])
def test_a_resumed_run_is_the_uninterrupted_one(run: dict[str, Any], tmp_path: Path, *, keeps_cache: bool) -> None:
    """A lost reference is computed again with the weights that training began with, not with those of the checkpoint.

    The lengths are an epoch's, so each run computes it with the same batches.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = {**run, "eval_fraction": 0.0, "max_steps": 6}
    surefoot.train({**settings, "output_dir": str(whole)}, screen=False)
    surefoot.train({**settings, "output_dir": str(parts), "max_steps": 4}, screen=False)
    if not keeps_cache:
        shutil.rmtree(cache_folder() / "references")
    surefoot.train({**settings, "output_dir": str(parts)}, screen=False)
    assert numbers(whole) == numbers(parts)
    one, other = (folder / "model/model.safetensors" for folder in (whole, parts))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_an_adapter_to_start_from_is_the_reference(run: dict[str, Any], tmp_path: Path) -> None:
    lora = {**run, "tuning": "lora", "lora_rank": 4, "learning_rate": 0.01}
    first = surefoot.train({**lora, "output_dir": str(tmp_path / "first")}, screen=False)
    result = surefoot.train({**lora, "init_adapter": str(first.artifact)}, screen=False)
    (line, *_) = numbers(result.run_folder)
    assert line["loss"] == pytest.approx(0.6931, abs=1e-4)
    other = surefoot.train({**lora, "init_adapter": str(first.artifact), "output_dir": str(tmp_path / "third"),
                            "learning_rate": 0.002}, screen=False)  # fmt: skip
    assert len(stored()) == 2, "of the training rows and of those held out"
    assert other.metrics[0]["loss"] == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.long
def test_a_damaged_reference_is_computed_again(run: dict[str, Any], tmp_path: Path) -> None:
    surefoot.train(run, screen=False)
    for path in stored():
        path.write_bytes(path.read_bytes()[:50])
    surefoot.train({**run, "output_dir": str(tmp_path / "again")}, screen=False)
    assert steps(tmp_path / "run") == steps(tmp_path / "again")


@pytest.mark.long
@pytest.mark.parametrize("topology", [{"zero_stage": 3}, {"expert_parallel_size": 2}], ids=str)
def test_ranks_compute_what_one_does(run: dict[str, Any], tmp_path: Path, topology: dict[str, Any]) -> None:
    surefoot.train(run, screen=False)
    shutil.rmtree(cache_folder() / "references")
    config = tmp_path / "two.yaml"
    config.write_text(yaml.safe_dump({**run, **topology, "nproc_per_node": 2, "output_dir": str(tmp_path / "two")}))
    two = command("train", str(config))
    assert two.returncode == 0, two.stderr
    for line, same in zip(steps(tmp_path / "run"), steps(tmp_path / "two"), strict=True):
        assert line == pytest.approx(same, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_runs_that_differ_in_what_is_compared_share_no_reference(run: dict[str, Any], tmp_path: Path) -> None:
    """Which answers are mismatched depends on the rows in use, and only one loss of KTO has them at all."""
    data = str(write_jsonl(tmp_path / "labelled.jsonl", labelled_rows(20)))
    kto = {**run, "method": "kto", "dataset": data, "max_steps": 2}
    for number, changes in enumerate(({"loss_type": "apo_zero_unpaired"}, {"eval_fraction": 0.0}, {})):
        settings = {**kto, **changes, "output_dir": str(tmp_path / str(number))}
        (first, *_) = surefoot.train(settings, screen=False).metrics
        assert first["loss"] == pytest.approx(0.5, abs=1e-5)
        assert first.get("kl", 0.0) == pytest.approx(0.0, abs=1e-4)
    assert len(stored()) == 5, "of training and held-out rows each, but for the run that holds none out"


@pytest.mark.slow
def test_an_adapter_with_another_scale_is_another_reference(run: dict[str, Any], tmp_path: Path) -> None:
    lora = {**run, "tuning": "lora", "lora_rank": 4, "learning_rate": 0.01, "max_steps": 2}
    first = surefoot.train({**lora, "output_dir": str(tmp_path / "first")}, screen=False)
    assert first.artifact is not None
    for alpha in (16, 64):
        adapter = Path(shutil.copytree(first.artifact, tmp_path / f"adapter-{alpha}"))
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": alpha}))
        changes = {"init_adapter": str(adapter), "lora_alpha": alpha, "output_dir": str(tmp_path / str(alpha))}
        (line, *_) = surefoot.train({**lora, **changes}, screen=False).metrics
        assert line["rewards/chosen"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_weights_that_change_under_a_run_are_refused(run: dict[str, Any], tmp_path: Path) -> None:
    base = Path(shutil.copytree(run["model"], tmp_path / "base"))
    settings = {**run, "model": str(base), "max_steps": 2, "eval_fraction": 0.0}
    surefoot.train(settings, screen=False)
    (path,) = base.glob("*.safetensors")
    save_file({name: value * 1.3 for name, value in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="other weights of the reference"):
        surefoot.train({**settings, "max_steps": 4}, screen=False)
