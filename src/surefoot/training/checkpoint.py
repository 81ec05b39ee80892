"""Checkpoints: written whole or not at all, checked before they are trusted, named by global parameter names.

    step-00000100/manifest.json   format version, step, config, SHA-256 of every file
                  model/          what is trained, safetensors through torch DCP
                  optimizer/      its moments, under `<moment>.<parameter>`
                  state.json      counters

Nothing here depends on how many ranks wrote it. No pickle is written or read.
"""

import errno
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import surefoot
from surefoot.data.order import Position
from surefoot.errors import CheckpointError, StorageError
from surefoot.findings import Finding
from surefoot.storage import new_folder, sha256_of, storage_error, write_json

FORMAT_VERSION = 3
NAME = re.compile(r"^step-(\d{8})$")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


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
) -> Path:
    """Write the checkpoint of `state.step` and delete those beyond the newest `keep`.

    Raises: StorageError where the disk refuses; older checkpoints stay.
    """
    target = checkpoint_folder(run_folder, state.step)
    with new_folder(target) as folder, _storage_errors_of_dcp(target):
        _write_tensors(folder / "model", {name: p.detach() for name, p in parameters.items()})
        _write_tensors(folder / "optimizer", _moments(parameters, optimizer))
        write_json(folder / "state.json", asdict(state))
        files = {str(path.relative_to(folder)): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        manifest = {
            "format_version": FORMAT_VERSION,
            "surefoot_version": surefoot.__version__,
            "step": state.step,
            "config": dict(config),
            "files": files,
        }
        write_json(folder / "manifest.json", manifest)
    for old in list_checkpoints(run_folder)[: -keep if keep else 0]:
        shutil.rmtree(old)
    return target


@contextmanager
def _storage_errors_of_dcp(target: Path) -> Iterator[None]:
    """DCP wraps what a rank raised; a refusal of the file system inside becomes our StorageError."""
    try:
        yield
    except CheckpointException as error:
        for failure in error.failures.values():
            cause: BaseException | None = failure[0]
            if isinstance(cause, OSError):
                raise storage_error(target, cause) from error
            if "No space left" in str(cause) or "File too large" in str(cause):
                raise storage_error(target, OSError(errno.ENOSPC, str(cause).splitlines()[0])) from error
        raise StorageError(f"{target}: could not be written: {error}") from error


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process: as intended
        state_dict_saver.save(
            tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True
        )


def _read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place. Names and shapes must agree exactly."""
    reader = HuggingFaceStorageReader(str(folder))
    stored = {name: tuple(entry.size) for name, entry in _entries(reader).items()}
    wanted = {name: tuple(value.shape) for name, value in tensors.items()}
    if stored != wanted:
        different = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
        name = different[0]
        raise CheckpointError(
            f"{folder}: {len(different)} tensors do not fit this run; {name} is {stored.get(name, 'absent')} there and "
            f"{wanted.get(name, 'absent')} here. The checkpoint belongs to another model or LoRA setting."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{folder}: could not be read: {error}") from error


def _entries(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    stored = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


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
    """Put a verified checkpoint's weights and moments in place and return its counters.

    Raises: CheckpointError where names or shapes differ from this run's.
    """
    _read_tensors(path / "model", {name: parameter.detach() for name, parameter in parameters.items()})
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moments[f"step.{name}"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments[f"exp_avg.{name}"] = torch.zeros_like(parameter, requires_grad=False)
        moments[f"exp_avg_sq.{name}"] = torch.zeros_like(parameter, requires_grad=False)
    _read_tensors(path / "optimizer", moments)
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {moment: moments[f"{moment}.{name}"] for moment in MOMENTS}
    values = json.loads((path / "state.json").read_text("utf-8"))
    return TrainState(**{**values, "position": Position(**values["position"])})


def read_parameters(path: Path) -> dict[str, Tensor]:
    """The trained parameters of a checkpoint by name, in full, without a model."""
    entries = _entries(HuggingFaceStorageReader(str(path / "model")))
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    _read_tensors(path / "model", tensors)
    return tensors
