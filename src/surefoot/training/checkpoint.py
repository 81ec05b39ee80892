"""Checkpoints: written whole or not at all, checked before they are trusted, named by global parameter names.

    step-00000100/manifest.json   format version, step, config, SHA-256 of every file
                  model/          what is trained, a file per rank that wrote (see `pieces`)
                  optimizer/      its moments, under `<moment>.<parameter>`
                  state.json      counters

Nothing here depends on how many ranks wrote it. No pickle is written or read.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import surefoot
from surefoot.data.order import Position
from surefoot.errors import CheckpointError
from surefoot.findings import Finding
from surefoot.models.placement import block_of
from surefoot.parallel.ranks import ALONE, Ranks
from surefoot.storage import sha256_of, storage_error, sync_file, sync_folder, write_json
from surefoot.training.pieces import Pieces, write_pieces

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
    data_fingerprint: str = ""
    position: Position = field(default_factory=Position)
    """Where in the order of the data the next step begins."""
    epoch: float = 0.0
    """Passes over the data so far."""
    warmup_end: float = 0.0
    """Share of the run after which `warmup_steps` were done; 0 until then."""


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted; the text says which file and why."""


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. One that was being written when the process died is not among them."""
    folder = run_folder / "checkpoints"
    return sorted(path for path in folder.iterdir() if NAME.match(path.name)) if folder.is_dir() else []


def remove_leftovers(run_folder: Path) -> None:
    """Delete what an interrupted save left behind. Only for the process that holds the run folder."""
    for path in (*run_folder.glob(".*.tmp"), *(run_folder / "checkpoints").glob(".step-*.tmp")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_checkpoint(
    run_folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    config: Mapping[str, Any],
    keep: int | None,
    ranks: Ranks = ALONE,
) -> Path:
    """Write the checkpoint of `state.step`, each rank its part, and delete those beyond the newest `keep`.

    Collective. Raises: StorageError on all ranks where the disk refuses any; older checkpoints stay.
    """
    target = checkpoint_folder(run_folder, state.step)
    temporary = target.with_name(f".{target.name}.tmp")
    ranks.from_first(lambda: _empty_folders(temporary))
    try:
        written = ranks.together(lambda: _write_part(temporary, target, parameters, optimizer, ranks))
        files = {name: digest for part in ranks.gather(written) for name, digest in part.items()}
        ranks.from_first(lambda: _complete(temporary, target, state, config, files))
    finally:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    if ranks.is_first:
        for old in list_checkpoints(run_folder)[: -keep if keep else 0]:
            shutil.rmtree(old)
    return target


def _empty_folders(temporary: Path) -> None:
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        for part in PARTS:
            (temporary / part).mkdir(parents=True)
    except OSError as error:
        raise storage_error(temporary, error) from error


def _write_part(
    temporary: Path,
    target: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> dict[str, str]:
    """Write what this rank holds; returns the SHA-256 of each of its files."""
    blocks = {
        "model": {name: block_of(parameter) for name, parameter in parameters.items()},
        "optimizer": {
            f"{moment}.{name}": block_of(optimizer.state[parameter][moment])
            for name, parameter in parameters.items()
            if parameter in optimizer.state
            for moment in MOMENTS
        },
    }
    digests = {}
    for part in PARTS:
        path = temporary / part / f"rank-{ranks.rank:05d}.safetensors"
        try:
            write_pieces(path, blocks[part], is_first=ranks.is_first)
            sync_file(path)
            digests[str(path.relative_to(temporary))] = sha256_of(path)
        except OSError as error:
            raise storage_error(target, error) from error
        except SafetensorError as error:  # it wraps what the system says
            raise storage_error(target, OSError(errno.EIO, str(error))) from error
    return digests


def _complete(
    temporary: Path, target: Path, state: TrainState, config: Mapping[str, Any], files: dict[str, str]
) -> None:
    """All parts are there: say so, and let the checkpoint be found."""
    write_json(temporary / "state.json", asdict(state))
    manifest = {
        "format_version": FORMAT_VERSION,
        "surefoot_version": surefoot.__version__,
        "step": state.step,
        "config": dict(config),
        "files": {**files, "state.json": sha256_of(temporary / "state.json")},
    }
    write_json(temporary / "manifest.json", manifest)
    try:
        for part in PARTS:
            sync_folder(temporary / part)
        sync_folder(temporary)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_error(target, error) from error


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
            f"{path} has format version {version}; this Surefoot reads {FORMAT_VERSION}. Use the version that wrote it."
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


def load_checkpoint(path: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> TrainState:
    """Put this rank's part of a verified checkpoint's weights and moments in place and return its counters.

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
    values = json.loads((path / "state.json").read_text("utf-8"))
    return TrainState(**{**values, "position": Position(**values["position"])})


def read_parameters(path: Path) -> dict[str, Tensor]:
    """The trained parameters of a checkpoint by name, in full, without a model."""
    pieces = Pieces(path / "model")
    return {name: pieces.read(name) for name in pieces.shapes}
