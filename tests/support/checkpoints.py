"""Checkpoints of a small model that is made by hand, and manifests that are written anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.system.atomic_io import sha256_of
from surefoot.training.async_checkpoint import Saver
from surefoot.training.checkpoint import TrainState
from surefoot.training.manifest import seal


def small_parameters() -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.ones(3, 2)), "bias": nn.Parameter(torch.ones(2))}


def save_steps(run_folder: Path, steps: range, keep: int | None, promise: Callable[[int], None]) -> None:
    """Train and save at each step, and promise the step once its save is said to be complete."""
    torch.manual_seed(0)
    parameters = small_parameters()
    optimizer = torch.optim.AdamW(parameters.values())
    saver = Saver(run_folder, {"seed": 1}, keep)
    for step in steps:
        for parameter in parameters.values():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        saver.save(parameters, optimizer, TrainState(step=step, tokens=step * 10, trained_tokens=step))
        saver.wait()
        saver.completed()
        promise(step)
    saver.end()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Make the manifest agree with the files as they are now, with changes to its keys."""
    manifest = {key: value for key, value in read_json(checkpoint / "manifest.json").items() if key != "sha256"}
    manifest["files"] = {name: sha256_of(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps(seal({**manifest, **changes})))


def as_format_3(checkpoint: Path) -> None:
    """Make the manifest what versions before format 4 wrote."""
    manifest = read_json(checkpoint / "manifest.json")
    manifest.pop("sha256")
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format_version": 3}))
