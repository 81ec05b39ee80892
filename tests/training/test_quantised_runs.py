"""Runs of quantised models: trained, resumed, exported in bfloat16, planned, checked and completed with."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from surefoot.cli import main
from surefoot.diagnostics.preflight.run_config import NAME
from surefoot.models.checkpoint_weights import CheckpointWeights
from surefoot.models.export import merge_adapter
from surefoot.models.model_size import weights_of
from surefoot.models.quantization.released import find_quantization
from surefoot.models.resolve_model import weight_files
from surefoot.training.checkpoint import list_checkpoints
from surefoot.training.sharded_tensors import ShardedTensors
from tests.support.adapters import logits_of, save, trained_model
from tests.support.quantised import RELEASES, edit_tensors, make_wide_model, read_by_transformers, split_scales
from tests.support.runs import SignalAfter, assert_same_run, numbers, settings_of, train_with


def assert_is_plain_bfloat16(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert find_quantization(folder / "config.json") is None
    types = {
        value.dtype for path in weight_files(folder) for name, value in load_file(path).items()
        if "correction_bias" not in name
    }  # fmt: skip
    assert types == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "targets"),
    [("fp8", ("all",)), ("fp8-experts", ("experts",)), ("int8", ("all",)), ("int4", ("attention",))],
)
def test_an_adapter_is_merged_in_bfloat16(
    name: str, targets: tuple[str, ...], released: Callable[[str], Path], tmp_path: Path
) -> None:
    base = released(name)
    built, settings = trained_model(base, name, targets=targets)
    adapter = save(built, settings, tmp_path / "adapter", base)
    merged = merge_adapter(base, adapter, tmp_path / "merged")
    assert_is_plain_bfloat16(merged)
    model, info = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    wanted = PeftModel.from_pretrained(read_by_transformers(name, base, torch.bfloat16).float(), str(adapter))
    updated = wanted.merge_and_unload().state_dict()
    assert updated.keys() == model.state_dict().keys()
    for parameter, value in model.state_dict().items():
        torch.testing.assert_close(value, updated[parameter].bfloat16().float(), rtol=2**-7, atol=1e-6)
    before, after = CheckpointWeights(base), CheckpointWeights(merged)
    assert before.weights.keys() == after.weights.keys()
    assert not all(torch.equal(before.read(weight), after.read(weight)) for weight in before.weights)
    torch.testing.assert_close(logits_of(model), logits_of(wanted), rtol=0.05, atol=0.01)


def test_infinity_in_the_config_of_a_quantised_base_stays_in_the_merged_one(
    released: Callable[[str], Path], tmp_path: Path
) -> None:
    """As Mamba 2 has it for time_step_limit."""
    base = Path(shutil.copytree(released("fp8"), tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    built, settings = trained_model(base, "fp8", targets=("attention",))
    merged = merge_adapter(base, save(built, settings, tmp_path / "adapter", base), tmp_path / "merged")
    assert json.loads((merged / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize("most_bytes", [40_000, 10_000_000])
def test_a_merged_model_has_an_index_of_its_own_if_it_has_several_files(
    most_bytes: int, released: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.models.safetensors_writer.MOST_BYTES", most_bytes)
    base = split_scales(released("fp8"), tmp_path / "base")
    built, settings = trained_model(base, "fp8", targets=("attention",))
    merged = merge_adapter(base, save(built, settings, tmp_path / "adapter", base), tmp_path / "merged")
    index = merged / "model.safetensors.index.json"
    assert index.exists() == (len(weight_files(merged)) > 2) == (most_bytes < 1_000_000)
    assert not index.exists() or "scale" not in index.read_text()
    _, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_run_resumes_and_is_exported_in_bfloat16(
    name: str,
    tuning: str,
    released: Callable[[str], Path],
    data_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = released(name)
    settings = settings_of(base, data_file, tmp_path / "run", max_steps=2, save_steps=1, tuning=tuning, report=False)
    settings |= {"lora_rank": 4} if tuning == "lora" else {}
    run = surefoot.train(settings, screen=True).run_folder
    assert "quantised" in capsys.readouterr().err
    stopped = {**settings, "output_dir": str(tmp_path / "stopped")}
    assert train_with(stopped, SignalAfter(1, signal.SIGTERM)).steps == 1
    again = surefoot.train(stopped, screen=False).run_folder
    if tuning == "lora":
        assert_same_run(run, again)
    assert numbers(run) == numbers(again)
    for number, (step, merge) in enumerate([(None, tuning == "lora"), (1, tuning == "lora")]):
        target = surefoot.export(run, tmp_path / f"out-{number}", merge=merge, step=step)
        assert "bfloat16" in capsys.readouterr().err
        assert_is_plain_bfloat16(target)
        model, info = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values()), info
        if tuning == "full":
            saved = ShardedTensors(list_checkpoints(run)[-1 if step is None else 0] / "model")
            trained = {parameter: saved.read(parameter).bfloat16().float() for parameter in saved.shapes}
            assert trained.keys() == dict(model.named_parameters()).keys()
            assert all(torch.equal(value, trained[parameter]) for parameter, value in model.named_parameters())
    if tuning == "lora":
        adapter = surefoot.export(run, tmp_path / "adapter")
        PeftModel.from_pretrained(read_by_transformers(name, base, torch.float32), str(adapter))
        assert "bfloat16" not in capsys.readouterr().err
        assert main(["chat", str(run), "--prompt", "Count", "--max-new-tokens", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["prompt"] == "Count"


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8", "fp8-experts", "int8", "int4"])
def test_it_is_planned_and_checked_like_the_weights_that_are_read_back(
    name: str, released: Callable[[str], Path], data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = released(name)
    plain = make_wide_model(RELEASES[name].kind).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    forecasts = []
    for folder in (base, tmp_path / "plain"):
        config = tmp_path / f"{folder.name}.yaml"
        settings = settings_of(folder, data_file, tmp_path / f"run-{folder.name}", target_modules=["attention"])
        config.write_text(json.dumps({**settings, "device": "auto"}))
        assert main(["plan", str(config), "device=h100", "host_gib=64", "--json"]) == 0
        forecasts.append(json.loads(capsys.readouterr().out))
    assert forecasts[0] == forecasts[1]
    weights = weights_of(base)
    assert weights is not None
    assert weights.parameters == sum(value.numel() for value in plain.state_dict().values())
    assert weights.bytes < 2 * weights.parameters
    assert main(["doctor", str(tmp_path / f"{base.name}.yaml"), "device=cpu", "--json"]) in (0, 3)
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["model"]["status"] == checks[NAME]["status"] == "ok", (checks["model"], checks[NAME])
    assert RELEASES[name].settings["quant_method"] in str(checks["model"])


def test_the_doctor_reports_scales_that_are_missing(
    released: Callable[[str], Path], data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = "model.layers.1.mlp.down_proj.weight"
    broken = edit_tensors(released("fp8"), tmp_path / "model", lambda tensors: tensors.pop(f"{lost}_scale_inv"))
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(settings_of(broken, data_file, tmp_path / "run")))
    assert main(["doctor", str(config), "--json"]) == 3
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks[NAME]["status"] == "failed"
    assert lost in str(checks[NAME])
    assert sum(check["status"] == "failed" for check in checks.values()) == 1


def test_a_quantised_dense_model_is_upcycled_in_bfloat16(released: Callable[[str], Path], tmp_path: Path) -> None:
    base = released("int8")
    moe = surefoot.upcycle(str(base), tmp_path / "moe", num_experts=2, top_k=1)
    assert_is_plain_bfloat16(moe)
    stored, dense = CheckpointWeights(moe), CheckpointWeights(base)
    for number in range(2):
        expert = stored.read(f"model.layers.1.block_sparse_moe.experts.{number}.w2.weight")
        assert torch.equal(expert, dense.read("model.layers.1.mlp.down_proj.weight"))
