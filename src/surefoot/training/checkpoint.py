"""Checkpoints: listing, verification and loading. `async_checkpoint` writes them.

    step-00000100/manifest.json   format version, step, config, SHA-256 of every file and of itself (see `manifest`)
                  model/          trained weights, biases of routers, a file per rank that wrote (see `sharded_tensors`)
                  optimizer/      optimizer moments, under `<moment>.<parameter>`
                  state.json      counters

Nothing here depends on how many ranks wrote it. No pickle is written or read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config import LoadedConfig, settings_class
from surefoot.data.sampler import Position
from surefoot.errors import CheckpointError, ConfigError
from surefoot.findings import Finding
from surefoot.methods.base import Method
from surefoot.methods.registry import method_of
from surefoot.models.dtensor_blocks import block_of
from surefoot.models.router_bias import is_router_bias
from surefoot.system.atomic_io import delete
from surefoot.system.json_files import DamagedFile, is_count, is_number, read_object
from surefoot.training.manifest import MANIFEST, NAME, STATE, check_files, read_manifest, refuse_unreadable
from surefoot.training.optimizers import STATE_OF_ALL, create_state, state_blocks
from surefoot.training.sharded_tensors import ShardedTensors

MAX_STATE_BYTES = 8 << 30
"""Largest size of state.json: with GRPO it holds completions."""
ADDED_IN_FORMAT_3 = frozenset(("base_fingerprint", "data_seen", "evaluation_is_due", "reward_files", "pending"))
"""Fields of state.json that the first versions with format 3 did not write."""


@dataclass(frozen=True)
class TrainState:
    """Counters of a run after `step` optimizer steps."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss_sum: float = 0.0
    """Sum of the steps' losses; their mean is the run's train_loss."""
    base_fingerprint: str = ""
    """Fingerprint of the base weights that an adapter is trained on."""
    data_fingerprint: str = ""
    data_seen: Mapping[str, str] = field(default_factory=dict)
    """Digests of data with images: see `Dataset.shard_digests`."""
    position: Position = field(default_factory=Position)
    """Position in the order of the data at which the next step begins."""
    epoch: float = 0.0
    """Passes over the data so far."""
    warmup_end: float = 0.0
    """Share of the run after which `warmup_steps` were done; 0 until then."""
    evaluation_is_due: bool = False
    """Whether the evaluation after this step was interrupted; a resumed run repeats it."""
    reward_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file with reward functions."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Completions that further steps train on, in a checkpoint of GRPO."""


def _is_share(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "step": is_count,
    "tokens": is_count,
    "trained_tokens": is_count,
    "loss_sum": is_number,
    "base_fingerprint": _is_text,
    "data_fingerprint": _is_text,
    "data_seen": _are_texts,
    "position": Position.is_json,
    "epoch": _is_share,
    "warmup_end": _is_share,
    "evaluation_is_due": lambda value: isinstance(value, bool),
    "reward_files": _are_texts,
    "pending": lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
}
"""Field of `TrainState` -> check whether a JSON value is valid for it."""


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first. One that was unfinished when the process died is not included."""
    folder = run_folder / "checkpoints"
    return sorted(path for path in folder.iterdir() if NAME.match(path.name)) if folder.is_dir() else []


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def remove_leftovers(run_folder: Path) -> None:
    """Delete files that an interrupted save left. Only for the process that holds the run folder. Raises: OSError."""
    for path in (run_folder / "checkpoints").glob(".step-*.tmp"):
        delete(path)


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint that a run can resume from, after reading and checking all of it.

    Raises: DamagedFile naming the file; CheckpointError for a newer format.
    """
    refuse_unreadable(path)
    refuse_unreadable(path / MANIFEST)
    manifest = read_manifest(path)
    check_files(path, manifest["files"])
    state = _read_state(path, manifest, may_lack=ADDED_IN_FORMAT_3 if manifest["format_version"] == 3 else frozenset())
    if state.step != manifest["step"]:
        raise DamagedFile(f"{path / STATE} is of step {state.step}, and the manifest of step {manifest['step']}")
    try:
        weights, moments = ShardedTensors(path / "model"), ShardedTensors(path / "optimizer")
        weights.check_whole()
        moments.check_whole()
    except CheckpointError as error:
        raise DamagedFile(str(error)) from error
    shapes = {name: shape for name, shape in weights.shapes.items() if not is_router_bias(name)}
    name = _find_misfit(manifest["config"], shapes, moments.shapes)
    if name is not None:
        raise DamagedFile(f"{path / 'optimizer'} does not fit {path / 'model'}: {name} is missing or another")
    return manifest


def _find_misfit(
    config: Mapping[str, Any], weights: Mapping[str, torch.Size], state: Mapping[str, torch.Size]
) -> str | None:
    """Return the name of a tensor of an optimizer's state that is missing, or does not belong to these weights."""
    parts = STATE_OF_ALL.get(config.get("optim", "adamw"))
    if parts is None:  # the state of each parameter depends on its shape, which loading checks
        return next((name for name in state if name.partition(".")[2] not in weights), None)
    expected = {
        f"{part}.{name}": torch.Size() if part == "step" else shape for name, shape in weights.items() for part in parts
    }
    return next((name for name in {**expected, **state} if expected.get(name) != state.get(name)), None)


def find_newest(run_folder: Path) -> tuple[Path | None, list[Finding]]:
    """Return the newest intact checkpoint, and a finding for each damaged one that was skipped."""
    findings = []
    for path in reversed(list_checkpoints(run_folder)):
        try:
            verify(path)
        except DamagedFile as error:
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
    """Return the counters of a verified checkpoint. Raises: CheckpointError if they have changed since."""
    try:
        return _read_state(path, read_manifest(path), may_lack=ADDED_IN_FORMAT_3)
    except DamagedFile as error:
        raise CheckpointError(str(error)) from error


def _read_state(checkpoint: Path, manifest: Mapping[str, Any], may_lack: frozenset[str]) -> TrainState:
    """Read state.json. Raises: ConfigError if the method of the run that wrote it is not available."""
    method = method_of(settings_class(str(manifest["config"].get("method", "sft"))))
    values = read_object(checkpoint / STATE, MAX_STATE_BYTES)
    for problem in _list_state_problems(values, method, may_lack):
        raise DamagedFile(f"{checkpoint / STATE} is no state of a run: {problem}")
    return TrainState(**{**values, "position": Position(**values["position"])})


def _list_state_problems(values: Mapping[str, Any], method: type[Method], may_lack: frozenset[str]) -> Iterator[str]:
    """Yield why JSON values are not those of a `TrainState`; a file may match its checksum and still be invalid."""
    yield from (f"it has no {name}" for name in sorted(CHECKS.keys() - values.keys() - may_lack))
    yield from (f"it has the unknown key {name[:80]!r}" for name in sorted(values.keys() - CHECKS.keys()))
    yield from (f"{name} is {repr(value)[:80]}" for name, value in values.items() if not CHECKS[name](value))
    yield from (f"pending: {problem}" for problem in method.problems_of_pending(values.get("pending", ())))


def check_resumable(loaded: LoadedConfig, path: Path, saved: TrainState, fresh: TrainState) -> None:
    """Check that a run can resume from the state of a checkpoint; `fresh`: the state of a run that would begin now.

    Raises: CheckpointError for other weights or data; ConfigError if `max_steps` is below its step.
    """
    uses_base = loaded.run.tuning == "lora" or loaded.run.keeps_reference
    if uses_base and saved.base_fingerprint and saved.base_fingerprint != fresh.base_fingerprint:
        if saved.base_fingerprint.split()[0] == fresh.base_fingerprint.split()[0]:
            raise CheckpointError(
                f"{path} was trained beside weights that were quantised to other bytes than quantization="
                f"{loaded.run.quantization} gives here. Install bitsandbytes in the version of then, or start a new "
                f"run in another output_dir ({loaded.where('quantization')})."
            )
        kind = "frozen weights" if loaded.run.tuning == "lora" else "weights of the reference"
        raise CheckpointError(
            f"{path} was trained with other {kind}: those of {loaded.run.model} have changed. Restore them, or "
            f"start a new run in another output_dir ({loaded.where('model')})."
        )
    if saved.data_fingerprint != fresh.data_fingerprint:
        files = ", ".join(item.path for item in loaded.run.dataset)
        raise CheckpointError(
            f"{path} was trained on other data: the rows of {files} or how they are rendered have changed "
            f"since. Restore them, or start a new run in another output_dir ({loaded.where('dataset')})."
        )
    max_steps = loaded.run.max_steps
    if max_steps is not None and saved.step > max_steps:
        raise ConfigError(
            f"max_steps={max_steps}, and the run in {loaded.run.run_folder} is at step {saved.step} already. "
            "Raise it, choose another output_dir, or take a checkpoint with `surefoot export RUN FOLDER --step N` "
            f"({loaded.where('max_steps')})."
        )


def load_checkpoint(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    biases: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Load this rank's part of a verified checkpoint's weights and moments.

    `biases`: tensors that are saved beside the weights and have no moments.
    Raises: CheckpointError if names, shapes or types differ from this run's, or parts are missing.
    """
    weights, moments = ShardedTensors(path / "model"), ShardedTensors(path / "optimizer")
    weights.check({name: (tensor.shape, tensor.dtype) for name, tensor in {**parameters, **biases}.items()})
    create_state(optimizer, parameters.values())
    blocks = state_blocks(optimizer, parameters)
    moments.check({name: (block.shape, block.local.dtype) for name, block in blocks.items()})
    for name, bias in biases.items():
        weights.fill(name, block_of(bias))
    for name, parameter in parameters.items():
        weights.fill(name, block_of(parameter))
    for name, block in blocks.items():
        moments.fill(name, block)
