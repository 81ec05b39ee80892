"""Settings of runs, runs that are stopped, and comparisons of two."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from surefoot.training.checkpoint import list_checkpoints

TIMES = {"tokens_per_second", "step_time_s", "peak_memory_bytes"}


class SignalAfter:
    """An observer that sends this process a signal at the end of a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def observe(self, event: Any) -> None:
        if getattr(event, "step", None) == self.step and hasattr(event, "loss"):
            os.kill(os.getpid(), self.number)


def numbers(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    assert (one / "adapter/adapter_model.safetensors").read_bytes() == (
        other / "adapter/adapter_model.safetensors"
    ).read_bytes()
    for part in ("model", "optimizer"):
        first, second = (next((list_checkpoints(run)[-1] / part).glob("*.safetensors")) for run in (one, other))
        tensors, others = load_file(first), load_file(second)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    states = [json.loads((list_checkpoints(run)[-1] / "state.json").read_text()) for run in (one, other)]
    assert states[0] == states[1]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    for key in ("status", "steps", "train_loss", "examples"):
        assert summaries[0][key] == summaries[1][key]


def train_with(settings: dict[str, Any], observer: Any) -> Any:
    from surefoot.config import load_config
    from surefoot.training.trainer import train

    return train(load_config(None, (), settings), [observer], screen=False)


def settings_of(model: Path, data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A run of ten steps whose batches divide by no number of ranks."""
    return {
        "model": str(model),
        "dataset": str(data),
        "output_dir": str(output),
        "max_length": 128,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "device": "cpu",
        "save_steps": 0,
        "global_batch_size": 7,
        "per_device_train_batch_size": 2,
        **changes,
    }
