"""One architecture per kind of layer trains on several ranks as on one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from tests.models.architectures import ARCHITECTURES, model_class_of, tiny_config, tiny_model
from tests.support.data import write_jsonl
from tests.support.runs import numbers, settings_of
from tests.support.shrinking import randomise

LORA: dict[str, Any] = {"target_modules": "all"}
FULL: dict[str, Any] = {"tuning": "full"}
JOBS: dict[str, dict[str, Any]] = {
    "llama": FULL,
    "mixtral": LORA,
    "deepseek_v3": LORA,
    "deepseek_v32": LORA,
    "gpt_oss": LORA,
    "gemma2": LORA,
    "lfm2_moe": FULL,
    "llama4_text": LORA,
    "mamba2": LORA,
    "qwen3_5_moe_text": FULL,
    "falcon_h1": FULL,
    "hrm_text": FULL,
    "kimi_linear": LORA,
    "olmo_hybrid": LORA,
}
WITHOUT_EXPERTS = {"llama", "gemma2", "mamba2", "falcon_h1", "hrm_text", "olmo_hybrid"}
CANNOT_SHARE_EXPERTS = {"llama4_text"}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2-zero3": (2, {"zero_stage": 3}),
    "2-ep2-zero3": (2, {"zero_stage": 3, "expert_parallel_size": 2}),
    "4-zero3": (4, {"zero_stage": 3}),
    "4-ep2-zero3": (4, {"zero_stage": 3, "expert_parallel_size": 2}),
}
STEPS = 3
TOLERANCE = 1e-4


def is_possible(topology: str, name: str) -> bool:
    if ARCHITECTURES[name].reason is not None:
        return False
    return "ep2" not in topology or name not in WITHOUT_EXPERTS | CANNOT_SHARE_EXPERTS


class Runs:
    """Runs all jobs of a topology in the same processes, when the first one is asked for."""

    def __init__(
        self, root: Path, data: Path, tokenizer: PreTrainedTokenizerFast, run_on: Callable[[int, Sequence[Any]], None]
    ) -> None:
        self._root, self._data, self._tokenizer, self._run_on = root, data, tokenizer, run_on

    def folder(self, topology: str, name: str) -> Path:
        if not (self._root / topology).exists():
            ranks, changes = TOPOLOGIES[topology]
            jobs = [self._settings(topology, each, changes) for each in JOBS if is_possible(topology, each)]
            self._run_on(ranks, jobs)
        return self._root / topology / name

    def _settings(self, topology: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        base = self._root / "models" / name
        if not base.exists():
            tiny_model(name, vocab_size=len(self._tokenizer)).save_pretrained(base)
            self._tokenizer.save_pretrained(base)
        output = self._root / topology / name
        return settings_of(base, self._data, output, packing=True, max_steps=STEPS, **JOBS[name], **changes)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    parallel_data: Path,
    tokenizer: PreTrainedTokenizerFast,
    run_on: Callable[[int, Sequence[Any]], None],
) -> Runs:
    return Runs(tmp_path_factory.mktemp("architectures"), parallel_data, tokenizer, run_on)


def outcome_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the metrics of a run, and the weights that it wrote."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    artifact = Path(json.loads((folder / "summary.json").read_text())["artifact"])
    weights = {name: value for path in artifact.glob("*.safetensors") for name, value in load_file(path).items()}
    return metrics, weights


@pytest.mark.long
def test_a_rank_with_short_samples_sums_the_gradients_that_others_have(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, run_on: Callable[[int, Sequence[Any]], None]
) -> None:
    """DeepSeek-V4 compresses keys of samples from a number of tokens on: here of every second row."""
    config = tiny_config("deepseek_v4", vocab_size=len(tokenizer))
    config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 48}
    model = model_class_of(config)._from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"query": "so", "response": "x" * (1 if number % 2 else 60)} for number in range(4)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    changes = {"tuning": "full", "global_batch_size": 4, "per_device_train_batch_size": 1, "shuffle": False}
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        run_on(ranks, [settings_of(tmp_path / "base", data, output, max_steps=2, **changes)])
    one, two = ([line["loss"] for line in numbers(tmp_path / ranks)] for ranks in "12")
    assert two == pytest.approx(one, rel=TOLERANCE)


@pytest.mark.models
@pytest.mark.parametrize(
    ("topology", "name"),
    [(topology, name) for topology in TOPOLOGIES for name in JOBS if topology != "1" and is_possible(topology, name)],
)
def test_an_architecture_trains_on_several_ranks_as_on_one(runs: Runs, topology: str, name: str) -> None:
    (metrics, weights), (spread_metrics, spread_weights) = (
        outcome_of(runs.folder(each, name)) for each in ("1", topology)
    )
    assert len(spread_metrics) == len(metrics) == STEPS
    for one, other in zip(metrics, spread_metrics, strict=True):
        assert other["tokens"] == one["tokens"]
        assert other["loss"] == pytest.approx(one["loss"], rel=TOLERANCE), one["step"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=TOLERANCE), one["step"]
    assert spread_weights.keys() == weights.keys()
    for key, value in spread_weights.items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=TOLERANCE, msg=key)
