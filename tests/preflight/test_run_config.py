"""What a run would be refused for is said by the doctor too."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import surefoot
from surefoot.cli import main
from surefoot.config import load_config
from surefoot.diagnostics.preflight.run_config import NAME, refusal
from surefoot.errors import ModelError
from surefoot.models.quantization import bitsandbytes_ops

GRPO = {"method": "grpo", "num_generations": 2, "global_batch_size": 4, "reward_funcs": ["exact_match"]}
Folders = Callable[[str], Path]


def said(settings: dict[str, Any], **changes: Any) -> tuple[str, str]:
    check = refusal(load_config(None, (), {**settings, **changes}))
    assert (check.finding.code if check.finding is not None else "") == ("SF743" if check.status == "failed" else "")
    return check.status, check.text


def test_a_run_that_would_start(settings: dict[str, Any], model_folder: Folders) -> None:
    assert said(settings)[0] == "ok"
    mixtral = {"model": str(model_folder("mixtral")), "nproc_per_node": 2, "expert_parallel_size": 2}
    assert said(settings, **mixtral)[0] == "ok"
    dense = {**mixtral, "model": str(model_folder("llama"))}
    status, cause = said(settings, **dense)
    assert (status, "no experts" in cause) == ("failed", True)
    assert cause.startswith("expert_parallel_size=2, ")
    assert said(settings, model="Qwen/Qwen3-0.6B")[0] == "ok", "what is fetched is not looked at"
    assert not Path(settings["output_dir"]).exists()


@pytest.mark.parametrize(
    ("package", "changes", "named"),
    [
        ("modelscope", {"model": "modelscope:Qwen/Qwen3-0.6B"}, "pip install modelscope"),
        ("datasets", {"dataset": "some/data"}, "pip install datasets"),
    ],
)
def test_packages_of_hubs_are_missed_before_the_run_starts(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, package: str, changes: dict[str, str], named: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    status, cause = said(settings, **changes)
    assert (status, named in cause) == ("failed", True)


@pytest.mark.parametrize("changes", [{"quantization": "nf4"}, {"optim": "adamw_8bit"}])
def test_a_package_is_missed_before_the_model_is_fetched(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    def find_none(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(bitsandbytes_ops, "version", find_none)
    status, cause = said(settings, model="Qwen/Qwen3-0.6B", **changes)
    assert (status, "pip install 'surefoot[quantized]'" in cause) == ("failed", True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "/nope"}, "/nope"),
        ({"device": "cuda"}, "device=cuda, "),
        ({"nproc_per_node": 3, "expert_parallel_size": 2}, "expert_parallel_size=2 .* 3 ranks"),
        ({"nproc_per_node": 2, "offload": "cpu"}, "offload=cpu .*device=cpu"),
        ({"dataset": "/none/rows.jsonl"}, "/none/rows.jsonl"),
        ({"eval_dataset": "/none/other.jsonl"}, "/none/other.jsonl"),
        ({"init_adapter": "/none"}, "/none"),
        ({"target_modules": ["nosuch"]}, "target_modules: 'nosuch' "),
        ({"target_modules": "all", "lora_dropout": 0.1}, "lora_dropout=0.1 "),
        ({"modules_to_save": ["nosuch"]}, "modules_to_save: nosuch "),
        ({"max_pixels": 100}, "max_pixels: "),
        ({"resume_from_checkpoint": "/nope"}, "resume_from_checkpoint=/nope: "),
        ({**GRPO, "reward_funcs": ["/none.py:f"]}, "reward_funcs: /none.py "),
        ({**GRPO, "rollout_engine": "vllm", "vllm_command": "/no/vllm"}, "vllm_command: .* /no/vllm "),
    ],
)
def test_what_would_be_refused(settings: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    status, cause = said(settings, **changes)
    assert status == "failed"
    assert re.search(text, cause), cause


def test_a_balance_of_routers_that_are_not_there_would_be_refused(
    settings: dict[str, Any], model_folder: Folders
) -> None:
    status, cause = said(settings, model=str(model_folder("llama")), router_aux_loss_coef=0.01)
    assert (status, cause.startswith("router_aux_loss_coef=0.01, ")) == ("failed", True)
    assert "LlamaForCausalLM" in cause
    assert said(settings, router_aux_loss_coef=0.01)[0] == "ok"


def test_files_that_are_no_folder_or_no_model(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/run"):
        status, cause = said(settings, output_dir=str(tmp_path / folder))
        assert (status, f"{tmp_path / 'file'} is a file" in cause) == ("failed", True)
    broken = shutil.copytree(settings["model"], tmp_path / "model")
    config = json.loads((broken / "config.json").read_text())
    quantised = json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    for text, reason in (("{", f"{broken / 'config.json'}: "), (quantised, "(gptq, ")):
        (broken / "config.json").write_text(text)
        status, cause = said(settings, model=str(broken))
        assert (status, reason in cause) == ("failed", True), cause


def change_config(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, name: value}))

    return change


def drop_last_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.popitem()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def become_an_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')


def become_a_run(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "run.yaml").touch()
    (folder / "adapter").mkdir()


def become_an_unfinished_run(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "run.yaml").touch()


def become_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def change_weights(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        value = change(weights.pop(name))
        added = {name: value} if value is not None else {}
        save_file(weights | added, folder / "model.safetensors", metadata={"format": "pt"})

    return change_file


def point_to(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")

    return change


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (change_weights(EXPERT, lambda _: None), rf"{EXPERT} is missing"),
        (change_weights(EXPERT, lambda weight: weight.T.contiguous()), rf"{EXPERT} has shape "),
        (change_weights("lm_head.weight", lambda weight: weight.to(torch.uint32)), "lm_head.weight is stored as U32"),
        (change_config("per_layer_config", {"1": {"num_local_experts": 2}}), "config.json: transformers .* read it"),
        (change_config("quantization_config", "fp8"), "an unknown method, quantization_config"),
        (point_to("config.json"), "config.json is a pointer of Git LFS"),
        (change_config("num_experts_per_tok", 9), "num_experts_per_tok=9, .* 6 experts"),
        (change_config("num_experts_per_tok", 0), "num_experts_per_tok=0, .* 6 experts"),
        (change_config("intermediate_size", 50), "of another shape .*experts"),
        (change_config("num_hidden_layers", 3), "are missing .*layers.2"),
        (change_config("num_hidden_layers", 1), "are unknown .*layers.1"),
        (drop_last_weight, "1 weights are missing"),
        (become_an_adapter, "adapter of 'some/base'.* init_adapter.* --merge"),
        (become_a_run, "adapter is .*/adapter "),
        (become_an_unfinished_run, "not ended. `surefoot export "),
        (become_a_pickle, "pytorch_model.bin is not read"),
    ],
)
def test_a_model_that_training_would_refuse(
    change: Callable[[Path], None], text: str, settings: dict[str, Any], model_folder: Folders, tmp_path: Path
) -> None:
    """The doctor reads the headers of all weights, and says what training would."""
    model = shutil.copytree(model_folder("mixtral"), tmp_path / "model")
    change(model)
    changed = {**settings, "model": str(model), "target_modules": "all"}
    status, cause = said(changed)
    assert status == "failed"
    assert re.search(text, cause), cause
    with pytest.raises(ModelError, match=re.escape(cause)):
        surefoot.train(changed, screen=False, max_steps=1)


@pytest.mark.parametrize(
    ("content", "text"), [(b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS")]
)
def test_a_damaged_file_is_told_once(
    content: bytes, text: str, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(settings["model"], tmp_path / "model")
    (model / "model.safetensors").write_bytes(content)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**settings, "model": str(model)}))
    assert main(["doctor", str(path), "--json"]) == 3
    failed = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["status"] == "failed"]
    assert [check["finding"]["code"] for check in failed] == ["SF718"]
    assert text in failed[0]["text"]
    with pytest.raises(ModelError, match=text):
        surefoot.train({**settings, "model": str(model)}, screen=False, max_steps=1, preflight=False)


def test_a_folder_of_another_run_would_be_refused(settings: dict[str, Any]) -> None:
    surefoot.train(settings, screen=False, max_steps=1)
    assert said(settings, max_steps=1)[0] == "ok"
    status, cause = said(settings, max_steps=1, learning_rate=0.5)
    assert (status, "another run" in cause) == ("failed", True)
    assert "learning_rate: " in cause
    assert said(settings, max_steps=1, learning_rate=0.5, overwrite_output_dir=True)[0] == "ok"


def test_the_verb_fails_with_it(settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**settings, "model": "/nope"}))
    assert main(["doctor", str(path)]) == 3
    assert re.search(f"^FAILED +{NAME} ", capsys.readouterr().out, re.M)
