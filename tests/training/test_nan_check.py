"""The origin of a loss that is not finite: weights, a kernel, a row, or updates that were too large."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import surefoot
from surefoot.errors import StoppedOnFinding
from surefoot.findings import Finding
from surefoot.models import attention


def finding_of(settings: dict[str, Any], **changes: Any) -> Finding:
    with pytest.raises(StoppedOnFinding) as caught:
        surefoot.train(settings, screen=False, **changes)
    return caught.value.finding


def break_attention(monkeypatch: pytest.MonkeyPatch, name: str, most_tokens: int = 30) -> None:
    """Let an attention function return NaN in rows that are longer than that of the probe."""
    whole = ALL_ATTENTION_FUNCTIONS[name]

    def broken(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output, weights = whole(module, query, *args, **kwargs)
        return output * (torch.nan if query.shape[2] > most_tokens else 1.0), weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, broken)


def test_a_damaged_weight_of_the_base_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = copytree(settings["model"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    finding = finding_of(settings, model=str(folder))
    assert finding.code == "SF401"
    assert name in finding.evidence["weights"]
    assert "learning rate is not the cause" in finding.fix
    assert "files" in finding.fix
    assert "float32" not in finding.fix, "it is set already"
    assert "with_plain_attention" not in finding.evidence


def test_weights_of_the_base_that_are_too_large_are_no_fault_of_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = copytree(settings["model"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    del settings["lora_rank"]
    finding = finding_of(settings, model=str(folder), tuning="full")
    assert finding.evidence["largest_trained_weight"] == pytest.approx(3e38)
    assert "too large" not in finding.cause


def test_a_kernel_that_fails_is_told_from_data(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    break_attention(monkeypatch, attention.IMPLEMENTATION)
    finding = finding_of(settings, packing=True)
    assert (finding.code, finding.evidence["with_plain_attention"]) == ("SF401", "finite")
    assert "kernel" in finding.fix


def test_what_plain_kernels_make_too_is_no_matter_of_kernels(
    settings: dict[str, Any], model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    normalise = LlamaRMSNorm.forward
    monkeypatch.setattr(
        LlamaRMSNorm,
        "forward",
        lambda self, states: normalise(self, states) * (torch.nan if states.shape[-2] > 30 else 1.0),
    )
    finding = finding_of(settings, model=str(model_folder("llama")), packing=True)
    assert finding.evidence["with_plain_attention"].startswith("not finite in ")
    assert "kernel" not in finding.fix
    assert "learning rate is not the cause" in finding.fix


def test_after_an_update_the_learning_rate_may_be_the_cause(
    settings: dict[str, Any], model_folder: Callable[[str], Path]
) -> None:
    finding = finding_of(settings, model=str(model_folder("mixtral")), max_steps=20, learning_rate=50.0)
    assert finding.evidence["step"] > 1
    assert "learning_rate" in finding.as_text()
    assert "not the cause" not in finding.as_text()
