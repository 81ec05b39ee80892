"""Checkpoints: found, checked before they are trusted, and read. `saver` writes them.

    step-00000100/manifest.json   format version, step, config, SHA-256 of every file
                  model/          what is trained, a file per rank that wrote (see `pieces`)
                  optimizer/      its moments, under `<moment>.<parameter>`
                  state.json      counters

Nothing here depends on how many ranks wrote it. No pickle is written or read.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.data.order import Position
from surefoot.errors import CheckpointError
from surefoot.findings import Finding
from surefoot.models.placement import block_of
from surefoot.storage import sha256_of
from surefoot.training.pieces import Pieces

FORMAT_VERSION = 3
NAME = re.compile(r"^step-(\d{8})$")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
PARTS = ("model", "optimizer")


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


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted; the text says which file and why."""


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
    """Delete what an interrupted save left behind. Only for the process that holds the run folder."""
    for path in (*run_folder.glob(".*.tmp"), *(run_folder / "checkpoints").glob(".step-*.tmp")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def verify(path: Path) -> dict[str, Any]:
    """Check every file against the manifest and return the manifest.

    Raises: DamagedCheckpoint naming the file; CheckpointError for a format this version does not know.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text("utf-8"))
        version, files = manifest["format_version"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path}/manifest.json is missing or unreadable ({error})") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this Surefoot reads {FORMAT_VERSION}. Use the version that wrote "
            f"it: surefoot {manifest.get('surefoot_version', 'of unknown version')}."
        )
    for name, digest in files.items():
        if not (path / name).is_file():
            raise DamagedCheckpoint(f"{path / name} is missing")
        try:
            found = sha256_of(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name} cannot be read: {error.strerror}") from error
        if found != digest:
            raise DamagedCheckpoint(f"{path / name} does not match its checksum")
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
    """The counters of a verified checkpoint."""
    values = json.loads((path / "state.json").read_text("utf-8"))
    return TrainState(**{**values, "position": Position(**values["position"])})


def load_checkpoint(path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put this rank's part of a verified checkpoint's weights and moments in place.

    Raises: CheckpointError where names or shapes differ from this run's, or parts are missing.
    """
    weights, moments = Pieces(path / "model"), Pieces(path / "optimizer")
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    weights.check(shapes)
    moments.check(
        {f"{m}.{name}": torch.Size() if m == "step" else shape for name, shape in shapes.items() for m in MOMENTS}
    )
    for name, parameter in parameters.items():
        weights.fill(name, block_of(parameter))
        filled = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for moment in MOMENTS[1:]:
            filled[moment] = torch.zeros_like(parameter, requires_grad=False)
        for moment, value in filled.items():
            moments.fill(f"{moment}.{name}", block_of(value))
        optimizer.state[parameter] = filled
