"""What a run would be refused for is said by the doctor too."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.cli import main
from surefoot.config import load_config
from surefoot.diagnostics.preflight.run_config import NAME, refusal

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
        (
            {"nproc_per_node": 2, "dtype": "bfloat16", "target_modules": ["attention", "router"]},
            "target_modules: .*float32, .*bfloat16 ",
        ),
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
