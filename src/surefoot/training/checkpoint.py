"""Checkpoints: found, checked before they are trusted, and read. `async_checkpoint` writes them.

    step-00000100/manifest.json   format version, step, config, SHA-256 of every file and of itself (see `manifest`)
                  model/          what is trained, a file per rank that wrote (see `sharded_tensors`)
                  optimizer/      its moments, under `<moment>.<parameter>`
                  state.json      counters

Nothing here depends on how many ranks wrote it. No pickle is written or read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.config import settings_class
from surefoot.data.sampler import Position
from surefoot.errors import CheckpointError
from surefoot.findings import Finding
from surefoot.methods.base import Method
from surefoot.methods.registry import method_of
from surefoot.models.dtensor_blocks import block_of
from surefoot.system.atomic_io import delete
from surefoot.system.json_files import DamagedFile, read_object
from surefoot.training.manifest import (
    MANIFEST,
    NAME,
    STATE,
    DamagedCheckpoint,
    check_files,
    read_manifest,
    refuse_unreadable,
)
from surefoot.training.sharded_tensors import ShardedTensors
from surefoot.training.state_fields import ADDED_IN_FORMAT_3, check_state

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
MAX_STATE_BYTES = 8 << 30
"""With GRPO a state holds completions."""


@dataclass(frozen=True)
class TrainState:
    """The counters of a run after `step` optimizer steps."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss_sum: float = 0.0
    """Sum of the steps' losses; their mean is the run's train_loss."""
    base_fingerprint: str = ""
    """Of the weights that an adapter is trained beside."""
    data_fingerprint: str = ""
    data_seen: Mapping[str, str] = field(default_factory=dict)
    """Of data with images: see `Dataset.seen`."""
    position: Position = field(default_factory=Position)
    """Where in the order of the data the next step begins."""
    epoch: float = 0.0
    """Passes over the data so far."""
    warmup_end: float = 0.0
    """Share of the run after which `warmup_steps` were done; 0 until then."""
    evaluation_is_due: bool = False
    """The one after this step was interrupted: a run that goes on makes up for it."""
    reward_files: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each file with reward functions."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """In a checkpoint of GRPO: the completions that further steps train on."""


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. One that was being written when the process died is not among them."""
    folder = run_folder / "checkpoints"
    return sorted(path for path in folder.iterdir() if NAME.match(path.name)) if folder.is_dir() else []


def step_of(path: Path) -> int:
    """The step after which one of them was written."""
    return int(path.name.removeprefix("step-"))


def remove_leftovers(run_folder: Path) -> None:
    """Delete what an interrupted save left behind. Only for the process that holds the run folder. Raises: OSError."""
    for path in (run_folder / "checkpoints").glob(".step-*.tmp"):
        delete(path)


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint that a run can go on from: all of it was read and checked.

    Raises: DamagedCheckpoint naming the file; CheckpointError for a newer format.
    """
    refuse_unreadable(path)
    refuse_unreadable(path / MANIFEST)
    manifest = read_manifest(path)
    check_files(path, manifest["files"])
    method = _method_of(manifest)
    state = _read_state(path, method, may_lack=ADDED_IN_FORMAT_3 if manifest["format_version"] == 3 else frozenset())
    if state.step != manifest["step"]:
        raise DamagedCheckpoint(f"{path / STATE} is of step {state.step}, and the manifest of step {manifest['step']}")
    try:
        weights, moments = ShardedTensors(path / "model"), ShardedTensors(path / "optimizer")
        weights.check_whole()
        moments.check_whole()
    except CheckpointError as error:
        raise DamagedCheckpoint(str(error)) from error
    wanted = {f"{m}.{name}": torch.Size() if m == "step" else s for name, s in weights.shapes.items() for m in MOMENTS}
    name = next((name for name in {**wanted, **moments.shapes} if wanted.get(name) != moments.shapes.get(name)), None)
    if name is not None:
        raise DamagedCheckpoint(f"{path / 'optimizer'} does not fit {path / 'model'}: {name} is missing or another")
    return manifest


def find_newest(run_folder: Path) -> tuple[Path | None, list[Finding]]:
    """The newest sound checkpoint, and a finding for each damaged one that was passed over."""
    findings = []
    for path in reversed(list_checkpoints(run_folder)):
        try:
            verify(path)
        except DamagedCheckpoint as error:
            findings.append(
                Finding(
                    code="SF601",
                    cause=str(error),
                    evidence={"checkpoint": str(path)},
                    fix="It is set aside and an older one is used. Check the disk if this happens again.",
                )
            )
            continue
        return path, findings
    return None, findings


def read_state(path: Path) -> TrainState:
    """Return the counters of a verified checkpoint. Raises: CheckpointError where they have changed since."""
    try:
        return _read_state(path, _method_of(read_manifest(path)), may_lack=ADDED_IN_FORMAT_3)
    except DamagedCheckpoint as error:
        raise CheckpointError(str(error)) from error


def _method_of(manifest: Mapping[str, Any]) -> type[Method]:
    """Return the method of the run that wrote a checkpoint. Raises: ConfigError if it is not available."""
    return method_of(settings_class(str(manifest["config"].get("method", "sft"))))


def _read_state(checkpoint: Path, method: type[Method], may_lack: frozenset[str]) -> TrainState:
    path = checkpoint / STATE
    try:
        values = read_object(path, MAX_STATE_BYTES)
        check_state(values, method, may_lack)
    except DamagedFile as error:
        raise DamagedCheckpoint(str(error)) from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is no state of a run: {error}") from error
    return TrainState(**{**values, "position": Position(**values["position"])})


def load_checkpoint(path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put this rank's part of a verified checkpoint's weights and moments in place.

    Raises: CheckpointError where names, shapes or types differ from this run's, or parts are missing.
    """
    weights, moments = ShardedTensors(path / "model"), ShardedTensors(path / "optimizer")
    weights.check({name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()})
    scalar = (torch.Size(), torch.float32)
    moments.check(
        {
            f"{moment}.{name}": scalar if moment == "step" else (parameter.shape, parameter.dtype)
            for name, parameter in parameters.items()
            for moment in MOMENTS
        }
    )
    for name, parameter in parameters.items():
        weights.fill(name, block_of(parameter))
        filled = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in MOMENTS[1:]:
            filled[moment] = torch.zeros_like(parameter, requires_grad=False)
        for moment, value in filled.items():
            moments.fill(f"{moment}.{name}", block_of(value))
        optimizer.state[parameter] = filled
