"""Asynchronous writer of checkpoints: each rank copies its part, then a thread of its own writes it.

    .step-00000100.tmp/model/rank-00000.safetensors ...    written by every rank
                       notes/rank-00000.json               that rank is done: the checksums of its files, or its failure
    step-00000100/                                         renamed by rank 0 once all notes are present

The threads communicate through the file system alone, so no collective ever runs beside training, and a rank that is
killed at any moment leaves a folder that is no checkpoint. Training waits only for the copy and for the previous save.
"""

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from surefoot.distributed.process_group import SINGLE_PROCESS, World
from surefoot.errors import StorageError, SurefootError
from surefoot.events import CheckpointSaved
from surefoot.models.dtensor_blocks import LocalShard, block_of
from surefoot.system.atomic_io import (
    delete,
    make_folder,
    raise_storage_error,
    replace_folder,
    sha256_of,
    storage_error,
    sync,
    write_json,
)
from surefoot.training.checkpoint import TrainState, checkpoint_folder, list_checkpoints
from surefoot.training.manifest import FORMAT_VERSION, MANIFEST, PARTS, STATE, seal
from surefoot.training.optimizers import state_blocks
from surefoot.training.sharded_tensors import select_owned_blocks, write_blocks
from surefoot.version import __version__

LOGGER = logging.getLogger(__name__)
DEADLINE_S = 3600.0
"""Longest time that rank 0 waits for the other ranks' parts of one checkpoint."""
POLL_S = 0.02
OTHERS_S = 5.0
"""Time that a failing last checkpoint waits for the other ranks' parts: mostly they are about as far with theirs."""
AGREE_EVERY_S = 0.5
"""Interval at which the ranks exchange their progress while they wait for a save."""
NOTES = "notes"

Blocks = dict[str, dict[str, LocalShard]]
"""Part of the checkpoint (`model`, `optimizer`) -> name -> block of this rank."""


class Saver:
    """Writer of the checkpoints of one run, one at a time."""

    def __init__(
        self, run_folder: Path, config: Mapping[str, Any], keep: int | None, ranks: World = SINGLE_PROCESS
    ) -> None:
        self._run_folder = run_folder
        self._config = config
        self._keep = keep
        self._ranks = ranks
        self._copies: dict[tuple[str, str], Tensor] = {}
        """Host memory for this rank's part, reused from save to save."""
        self._thread: threading.Thread | None = None
        self._error: SurefootError | None = None
        self._saved: CheckpointSaved | None = None
        self._is_abandoned = threading.Event()

    def save(self, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: TrainState) -> None:
        """Copy this rank's part and write it in the background, once the previous save is complete.

        `tensors`: parameters, and what is saved beside them and has no moments.
        Collective. Raises: StorageError on all ranks if the disk refuses any; older checkpoints stay.
        """
        self.wait()
        target = checkpoint_folder(self._run_folder, state.step)
        temporary = target.with_name(f".{target.name}.tmp")
        self._ranks.broadcast_from_rank0(lambda: _empty_folders(temporary, target))
        began = time.perf_counter()
        blocks = self._copy_blocks(tensors, optimizer)
        self._is_abandoned.clear()
        self._thread = threading.Thread(
            target=self._write, args=(temporary, target, blocks, state, began), name="saver", daemon=True
        )
        self._thread.start()

    def raise_error(self) -> None:
        """Raise StorageError if this rank's part of the last save failed."""
        if self._error is not None:
            raise self._error

    def completed(self) -> CheckpointSaved | None:
        """Return the save that was completed since the previous call, as far as this rank can tell."""
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> None:
        """Wait until the save in the background is complete. Collective. Raises: StorageError on all ranks."""
        if self._thread is not None:
            self._wait_for(self._thread)
            self._thread = None
        self._ranks.run_or_raise_on_all(self.raise_error)

    def _wait_for(self, thread: threading.Thread) -> None:
        """Wait until the thread has ended on all ranks, or is late. Collective.

        If a rank has failed, rank 0 no longer waits for its note, which a full disk may have refused as well.
        """
        deadline = time.monotonic() + DEADLINE_S
        failed: list[bool] = []
        while True:
            thread.join(AGREE_EVERY_S)
            is_writing = thread.is_alive() and time.monotonic() < deadline
            states = self._ranks.gather([is_writing, self._error is not None])
            if not any(writes for writes, _ in states):
                break
            if not failed and any(has_failed for _, has_failed in states):
                failed = [has_failed for _, has_failed in states]
                self._is_abandoned.set()
        if thread.is_alive():
            self._error = StorageError(f"{self._run_folder}: a checkpoint was not written in {DEADLINE_S:.0f} s.")
        elif failed and not failed[self._ranks.rank]:
            self._error = None  # only a consequence of the other rank's failure

    def end(self) -> None:
        """Let the disk finish at the end of the run, completed or not; wait only briefly for other ranks."""
        if self._thread is not None:
            self._thread.join(OTHERS_S)
        self._is_abandoned.set()
        if self._thread is not None:
            self._thread.join(DEADLINE_S)

    def _copy_blocks(self, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Blocks:
        """Return the blocks that this rank writes, copied to host memory."""
        blocks: Blocks = {
            "model": {name: block_of(tensor) for name, tensor in tensors.items()},
            "optimizer": state_blocks(optimizer, tensors),
        }
        is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        copied: Blocks = {part: {} for part in PARTS}
        for part, named in blocks.items():
            for name, block in select_owned_blocks(named, is_first=self._ranks.is_first).items():
                copy = self._copies.get((part, name))
                if copy is None or copy.shape != block.local.shape:
                    copy = torch.empty_like(block.local, device="cpu", pin_memory=block.local.is_cuda)
                    self._copies[part, name] = copy
                copy.copy_(block.local, non_blocking=True)
                copied[part][name] = replace(block, local=copy)
        if is_cuda:
            torch.cuda.synchronize()
        return copied

    def _write(self, temporary: Path, target: Path, blocks: Blocks, state: TrainState, began: float) -> None:
        """Write this rank's part in the background thread; rank 0 completes the checkpoint."""
        failure: SurefootError | None = StorageError(f"{target}: its writing was cut short. Older checkpoints stay.")
        try:
            note: dict[str, Any] = {}
            try:
                note["files"] = _write_part(temporary, target, blocks, self._ranks)
            except Exception as error:
                note["error"] = str(error) if isinstance(error, SurefootError) else _describe_error(error)
                raise
            finally:
                _leave_note(temporary / NOTES / f"rank-{self._ranks.rank:05d}.json", note)
            if self._ranks.is_first:
                files = self._gather_checksums(temporary)
                _complete(temporary, target, state, self._config, files)
                for old in list_checkpoints(self._run_folder)[: -self._keep if self._keep else 0]:
                    _delete_checkpoint(old)
            self._saved = CheckpointSaved(state.step, target, time.perf_counter() - began)
            failure = None
        except OSError as error:
            failure = storage_error(target, error)
        except SurefootError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - whatever the error is, this save is not complete
            failure = StorageError(f"{target}: could not be written: {_describe_error(error)}. Older checkpoints stay.")
        finally:
            self._error = failure
        if failure is not None and self._ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)

    def _gather_checksums(self, temporary: Path) -> dict[str, str]:
        """Wait for every rank's note, and return the checksums of all files. Raises: StorageError if a rank failed."""
        files: dict[str, str] = {}
        deadline = time.monotonic() + DEADLINE_S
        for rank in range(self._ranks.size):
            path = temporary / NOTES / f"rank-{rank:05d}.json"
            while not path.exists():
                if time.monotonic() > deadline or self._is_abandoned.wait(POLL_S):
                    raise StorageError(
                        f"{temporary}: rank {rank} of {self._ranks.size} has not written its part. "
                        "Older checkpoints stay. Do all machines share output_dir?"
                    )
            note = json.loads(path.read_text("utf-8"))
            if "error" in note:
                raise StorageError(note["error"])
            files |= note["files"]
        return files


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _delete_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint, so that no start takes it for one, then delete it; the next start removes any remains."""
    leaving = checkpoint.with_name(f".{checkpoint.name}.tmp")
    try:
        checkpoint.rename(leaving)
        sync(leaving.parent)  # lost power must not leave a checkpoint of its name without some of its files
        delete(leaving)
    except OSError as error:
        LOGGER.warning("an old checkpoint could not be deleted: %s", error)


def _empty_folders(temporary: Path, target: Path) -> None:
    with raise_storage_error(target):
        make_folder(target.parent)
        if temporary.exists():
            shutil.rmtree(temporary)
        for part in (*PARTS, NOTES):
            (temporary / part).mkdir(parents=True)


def _leave_note(path: Path, note: Mapping[str, Any]) -> None:
    """Leave a note for rank 0, which may rename the folder as soon as it sees the note."""
    unseen = path.with_suffix(".tmp")
    unseen.write_text(json.dumps(note), encoding="utf-8")
    os.replace(unseen, path)


def _write_part(temporary: Path, target: Path, blocks: Blocks, ranks: World) -> dict[str, str]:
    """Write this rank's blocks, and return the SHA-256 of each of its files."""
    digests = {}
    for part in PARTS:
        path = temporary / part / f"rank-{ranks.rank:05d}.safetensors"
        with raise_storage_error(target):
            try:
                write_blocks(path, blocks[part])
            except SafetensorError as error:  # it wraps the system's error
                raise OSError(errno.EIO, str(error)) from error
            sync(path)
            digests[str(path.relative_to(temporary))] = sha256_of(path)
    return digests


def _complete(
    temporary: Path, target: Path, state: TrainState, config: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Complete a checkpoint after all parts are written: write its manifest and rename its folder."""
    shutil.rmtree(temporary / NOTES)
    write_json(temporary / STATE, asdict(state))
    manifest = {
        "format_version": FORMAT_VERSION,
        "surefoot_version": __version__,
        "step": state.step,
        "config": dict(config),
        "files": {**files, STATE: sha256_of(temporary / STATE)},
    }
    write_json(temporary / MANIFEST, seal(manifest))
    for part in PARTS:
        sync(temporary / part)
    sync(temporary)
    sync(target.parent.parent)  # a start that was killed may have made `checkpoints` and not synced its name
    replace_folder(target, temporary)
