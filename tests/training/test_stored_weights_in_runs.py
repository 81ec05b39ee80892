"""Runs beside quantised frozen weights: they learn, resume, are exported, and refuse what does not fit."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import surefoot
from surefoot.config import load_config
from surefoot.errors import CheckpointError, ConfigError
from surefoot.models.quantization.formats import Nf4Format
from tests.methods.test_dpo import pair_rows
from tests.methods.test_kto import labelled_rows
from tests.support.data import write_jsonl
from tests.support.models import make_tokenizer
from tests.support.quantised import make_wide_model
from tests.support.runs import SignalAfter, assert_same_run, settings_of, train_with

pytestmark = pytest.mark.slow
NF4 = {"quantization": "nf4", "quantization_block_size": 32, "double_quantization": False}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> a folder with a model whose widths blocks of 32 divide."""
    root = tmp_path_factory.mktemp("wide")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            make_wide_model(kind).save_pretrained(path)
            make_tokenizer().save_pretrained(path)
        return path

    return folder


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", NF4),
        pytest.param("deepseek_v3", {**NF4, "double_quantization": True}, marks=pytest.mark.long),
        pytest.param("deepseek_v3", {"quantization": "int8"}, marks=pytest.mark.long),
    ],
)
def test_a_run_learns_and_resumes_bit_for_bit(
    kind: str, changes: dict[str, Any], wide_folder: Callable[[str], Path], data_file: Path, tmp_path: Path
) -> None:
    settings = settings_of(wide_folder(kind), data_file, tmp_path / "run", learning_rate=1e-2, save_steps=2, **changes)
    run = surefoot.train(settings, screen=False)
    assert run.metrics[-1]["loss"] < 0.96 * run.metrics[0]["loss"]
    stopped = {**settings, "output_dir": str(tmp_path / "stopped")}
    assert train_with(stopped, SignalAfter(5, signal.SIGTERM)).status == "interrupted"
    assert_same_run(run.run_folder, surefoot.train(stopped, screen=False).run_folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "dpo", "kto"])
def test_other_methods_train_beside_them(name: str, grpo: dict[str, Any], tmp_path: Path) -> None:
    rows = {"dpo": pair_rows, "kto": labelled_rows}
    settings = grpo if name == "grpo" else {
        "method": name, "model": grpo["model"], "dataset": str(write_jsonl(tmp_path / "rows.jsonl", rows[name](12))),
        "max_length": 128, "global_batch_size": 4, "device": "cpu", "report": False,
    }  # fmt: skip
    settings = {**settings, "quantization": "int8", "max_steps": 3, "output_dir": str(tmp_path / name)}
    run = surefoot.train(settings, screen=False)
    assert run.status == "completed"
    plain = surefoot.train({**settings, "quantization": None, "output_dir": str(tmp_path / "plain")}, screen=False)
    assert run.metrics[0]["loss"] == pytest.approx(plain.metrics[0]["loss"], abs=0.05)
    assert run.metrics != plain.metrics


def test_it_is_merged_into_the_weights_of_the_base_as_they_are(
    wide_folder: Callable[[str], Path], data_file: Path, tmp_path: Path, here: Callable[..., Any]
) -> None:
    base = wide_folder("llama")
    settings = settings_of(base, data_file, tmp_path / "run", max_steps=2, learning_rate=1e-2, **NF4)
    run = surefoot.train(settings, screen=False).run_folder
    merged = surefoot.export(run, tmp_path / "merged", merge=True)
    wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run / "adapter"))
    updated = wanted.merge_and_unload().state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(merged).state_dict().items():
        torch.testing.assert_close(value, updated[name], atol=1e-6, rtol=1e-5)
    assert here("chat", str(run), "--prompt", "Count", "--max-new-tokens", "2").returncode == 0


def test_a_run_does_not_go_on_beside_other_bytes(
    wide_folder: Callable[[str], Path], data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(wide_folder("llama"), data_file, tmp_path / "run", max_steps=4, save_steps=2, **NF4)
    assert train_with(settings, SignalAfter(2, signal.SIGTERM)).steps == 2
    for change, message in (
        ({"double_quantization": True}, "double_quantization: False -> True"),
        ({"quantization_block_size": 64}, "quantization_block_size: 32 -> 64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            surefoot.train({**settings, **change}, screen=False)
    monkeypatch.setattr(Nf4Format, "fingerprint", "0" * 16)
    with pytest.raises(CheckpointError, match=r"other bytes than quantization=nf4 .* bitsandbytes"):
        surefoot.train(settings, screen=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "int8", "tuning": "full"}, "quantised weights cannot be trained"),
        ({"quantization_block_size": 32}, "quantization_block_size without quantization=nf4 has no effect"),
        ({"quantization": "int8", "double_quantization": False}, "double_quantization without quantization=nf4"),
        ({"tuning": "full", "double_quantization": False}, "double_quantization without quantization=nf4"),
        ({"optim": "adafactor", "adam_beta1": 0.5}, "adam_beta1 has no effect with optim=adafactor"),
        ({"quantization": "nf4", "quantization_block_size": 48}, "quantization_block_size=48"),
        ({"quantization": "fp4"}, "quantization='fp4'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, settings: dict[str, Any]) -> None:
    del settings["lora_rank"]
    with pytest.raises(ConfigError, match=message):
        load_config(None, [], {**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["quantization=nf4"], r"rows of 32 numbers.*quantization_block_size: 32.*\(command line"),
        pytest.param(["quantization=int8", "target_modules=[vision]"], "'vision' is empty", marks=pytest.mark.long),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    changes: list[str], message: str, settings: dict[str, Any], tmp_path: Path, here: Callable[..., Any]
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    refused = here("train", str(tmp_path / "run.yaml"), *changes)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert re.search(message, " ".join(refused.stderr.split())), refused.stderr
