"""Run folder: held by one process at a time, never shared by two runs, and the start of a resumed run."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.config import LoadedConfig, changed_fields
from surefoot.config.documents import parse_yaml, read_text
from surefoot.distributed.process_group import World
from surefoot.errors import CheckpointError, ConfigError
from surefoot.findings import Finding
from surefoot.system.atomic_io import delete, make_folder, repair_folder, storage_error, sync
from surefoot.system.json_files import DamagedFile, read_object
from surefoot.training.checkpoint import find_newest, list_checkpoints, remove_leftovers, step_of, verify
from surefoot.training.manifest import read_manifest, wrong_size
from surefoot.training.run_summary import (
    COMPLETIONS,
    EVAL_COMPLETIONS,
    FINDINGS,
    LOG,
    METRICS,
    SAMPLES,
    SUMMARY,
    drop_findings_before,
)

ENVIRONMENT = "environment.json"
LOCK = ".lock"
OWN_FILES = (
    LOCK, "run.yaml", ENVIRONMENT, METRICS, LOG, COMPLETIONS, EVAL_COMPLETIONS, SAMPLES, SUMMARY, FINDINGS,
    "report.html",
)  # fmt: skip
"""Files that a run writes into its folder."""
OWN_ENTRIES = (*OWN_FILES[1:], "events", "evidence", "checkpoints", "adapter", "model", "engine", "tensorboard")
"""Files and folders that a run writes into its folder."""
SHARED_WITHIN_S = 60.0
"""Seconds that a network file system may take to show a new file on another machine."""

NOT_OVERWRITTEN = ("events", "engine", FINDINGS, ENVIRONMENT)
"""Files that a start writes before it deletes the run that it overwrites."""
LEFT_BY_FAILURE = ("summary.json", "findings.jsonl", "events", "evidence", "engine", "tensorboard")
"""Files that a run that fails before its first step leaves."""


@dataclass(frozen=True)
class Resume:
    """Checkpoint to resume from, and the findings made while looking for it."""

    checkpoint: Path | None
    findings: list[Finding]
    token: str = ""
    """Token that this claim wrote into the folder; see `check_shared`."""
    claimed_s: float = 0.0
    """Time of the claim, in seconds since 1970."""
    notes: tuple[str, ...] = ()
    """Notes for the user about how that was decided."""


def check_folder(loaded: LoadedConfig) -> None:
    """Check the folder without changing it.

    Raises: ConfigError for a file, for a folder with files of no run, and for links that a run must not follow.
    """
    _refuse_links(loaded)
    folder = loaded.run.run_folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        what = " is a file" if existing == folder else f": {existing} is a file"
        raise ConfigError(f"output_dir={loaded.run.run_folder}{what} ({loaded.where('output_dir')}).")
    odd = sorted(name for name in OWN_FILES if (folder / name).exists() and not (folder / name).is_file())
    if existing == folder and odd:  # opening a pipe would wait for its other end
        raise ConfigError(
            f"output_dir={loaded.run.run_folder}: {', '.join(odd)} must be a file, not a folder, a pipe or a device. "
            f"Remove it, or give another folder ({loaded.where('output_dir')})."
        )
    if existing == folder and not _is_run_folder(folder):
        strangers = sorted(p.name for p in folder.iterdir() if p.name not in LEFT_BY_FAILURE and p.name[0] != ".")
        if strangers:
            raise ConfigError(
                f"output_dir={loaded.run.run_folder} holds files that are no run: {', '.join(strangers[:5])}. Nothing "
                f"was touched. Give a new or empty folder ({loaded.where('output_dir')})."
            )


@contextmanager
def claim(loaded: LoadedConfig) -> Iterator[Resume]:
    """Claim the run folder for this process, decide what to resume, and refuse to mix two runs."""
    folder = loaded.run.run_folder
    check_folder(loaded)
    try:
        make_folder(folder)
        lock = open(folder / LOCK, "a+")  # noqa: SIM115 - held until the run ends
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be written: {error.strerror} ({loaded.where('output_dir')})."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output_dir={folder} is in use by another process right now: `surefoot watch {folder}` shows it. "
                f"Choose another folder for another run ({loaded.where('output_dir')})."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"output_dir={folder} is on a file system that takes no locks: {error.strerror}. Two runs could write "
                f"into it at once. Choose another, or mount it with locks, such as Lustre with -o flock "
                f"({loaded.where('output_dir')})."
            ) from error
        token = secrets.token_hex(8)
        try:
            repair_folder(folder)
            resume = _decide_resume(loaded)
            remove_leftovers(folder)
            lock.truncate(0)
            lock.write(token)
            lock.flush()
            os.fsync(lock.fileno())
        except PermissionError:  # it names the file
            raise
        except OSError as error:
            raise storage_error(folder, error) from error
        yield replace(resume, token=token, claimed_s=time.time())


@contextmanager
def claim_on_rank0(loaded: LoadedConfig, ranks: World) -> Iterator[Resume]:
    """Claim the run folder on rank 0 for all ranks, and yield where to resume. Collective."""
    with ExitStack() as stack:
        local_resume = Resume(None, [])

        def claim_folder() -> dict[str, str | None]:
            nonlocal local_resume
            local_resume = stack.enter_context(claim(loaded))
            checkpoint = local_resume.checkpoint
            return {"checkpoint": str(checkpoint) if checkpoint is not None else None, "token": local_resume.token}

        claimed = ranks.broadcast_from_rank0(claim_folder)
        ranks.run_or_raise_on_all(lambda: check_shared(loaded, claimed["token"]))
        checkpoint = claimed["checkpoint"]
        yield replace(local_resume, checkpoint=Path(checkpoint) if checkpoint is not None else None)


def _refuse_links(loaded: LoadedConfig) -> None:
    """Raise ConfigError for a link where a run writes a file, or to a folder that this run would delete.

    The file would be written to the link's target. A folder may be a link, such as checkpoints on a larger disk, but
    deleting it would leave its files there, and deleting them could hit those of another run.
    """
    where = loaded.where("output_dir")
    for name in (LOCK, *OWN_ENTRIES):
        path = loaded.run.run_folder / name
        if not path.is_symlink():
            continue
        if not path.is_dir():
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, which this run would write to. Delete the link, or choose "
                f"another output_dir ({where})."
            )
        if loaded.run.overwrite_output_dir and name not in NOT_OVERWRITTEN:
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, and overwrite_output_dir follows no link. Delete the files in "
                f"that folder yourself and then the link, or choose another output_dir ({where})."
            )


def check_shared(loaded: LoadedConfig, token: str) -> None:
    """Check on any rank that rank 0 has claimed this folder. Raises: ConfigError after `SHARED_WITHIN_S`."""
    folder = loaded.run.run_folder
    deadline = time.monotonic() + SHARED_WITHIN_S
    while True:
        try:
            if (folder / LOCK).read_text() == token:
                return
        except OSError:  # not visible here, or not yet
            pass
        if time.monotonic() > deadline:
            raise ConfigError(
                f"output_dir={folder} is not shared: this machine does not see what rank 0 wrote there "
                f"{SHARED_WITHIN_S:.0f} s ago. Checkpoints need a folder that all machines share "
                f"({loaded.where('output_dir')})."
            )
        time.sleep(0.2)


def _is_run_folder(folder: Path) -> bool:
    """Return whether a run was assembled here. Any folder can hold a run.yaml.

    A run writes environment.json with our name. If that is damaged, a checkpoint with a valid manifest is proof.
    """
    with suppress(DamagedFile):
        if "surefoot" in read_object(folder / ENVIRONMENT):
            return True
    return newest_manifest(folder) is not None


def newest_manifest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint with a valid manifest, and that manifest; its other files are not checked."""
    for checkpoint in reversed(list_checkpoints(folder)):
        with suppress(DamagedFile, CheckpointError):
            return checkpoint, read_manifest(checkpoint)
    return None


def delete_run(folder: Path, claimed_s: float) -> None:
    """Delete the files that a run wrote into its folder, except those that this start wrote since its claim."""
    drop_findings_before(folder, claimed_s)
    for path in (folder / name for name in OWN_ENTRIES if name not in NOT_OVERWRITTEN):
        if path.exists():
            delete(path)
    sync(folder)
    # Last, because without it the remaining files would pass for files of the user.
    (folder / ENVIRONMENT).unlink(missing_ok=True)


def _has_trained_run(folder: Path) -> bool:
    """Return whether a run took a step here."""
    metrics = folder / METRICS
    return bool(list_checkpoints(folder)) or (metrics.is_file() and metrics.stat().st_size > 0)


def _decide_resume(loaded: LoadedConfig) -> Resume:
    config, notes = loaded.run, check_resume(loaded)
    if config.overwrite_output_dir or config.resume_from_checkpoint is False:
        return Resume(None, [])  # a run to overwrite is deleted once the new one is ready for its first step
    if config.resume_from_checkpoint == "auto":
        resume = _find_newest_and_set_aside(config.run_folder)
        if resume.checkpoint is None and _is_run_folder(config.run_folder):
            notes += (f"no checkpoint yet in {config.run_folder}: starting again at step 1",)
        return replace(resume, notes=notes)
    check_named_checkpoint(loaded)
    path = Path(str(config.resume_from_checkpoint))
    where = loaded.where("resume_from_checkpoint")
    try:
        manifest = verify(path)
    except DamagedFile as error:
        raise CheckpointError(
            f"resume_from_checkpoint={path} is damaged: {error}. Name an older one ({where})."
        ) from error
    changes = changed_fields(manifest["config"], config)
    if changes:
        raise CheckpointError(f"{path} was written with other settings: {'; '.join(changes)} ({where}).")
    return Resume(path, [], notes=notes)


def check_resume(loaded: LoadedConfig) -> tuple[str, ...]:
    """Raise ConfigError or CheckpointError if `output_dir` holds a run that this run would not resume.

    Checksums are not compared, and nothing is changed. Returns notes for the user on how that was decided.
    """
    if loaded.run.overwrite_output_dir:
        _refuse_own_inputs(loaded)
        return ()
    return _refuse_other_run(loaded) if _has_trained_run(loaded.run.run_folder) else ()


def check_named_checkpoint(loaded: LoadedConfig) -> None:
    """Raise CheckpointError if `resume_from_checkpoint` names no checkpoint."""
    if loaded.run.resume_from_checkpoint in ("auto", False):
        return
    path, where = Path(str(loaded.run.resume_from_checkpoint)), loaded.where("resume_from_checkpoint")
    if not path.is_dir():
        raise CheckpointError(f"resume_from_checkpoint={path}: no such folder ({where}).")
    inside = list_checkpoints(path)
    if inside:
        raise CheckpointError(
            f"resume_from_checkpoint={path} is a run folder. Name one of its checkpoints, such as {inside[-1]}, or set "
            f"output_dir to it and leave resume_from_checkpoint out ({where})."
        )


def _find_newest_and_set_aside(folder: Path) -> Resume:
    """Return the newest intact checkpoint; damaged ones are renamed, so that nothing counts or finds them again."""
    newest, findings = find_newest(folder)
    if findings and newest is None:
        raise CheckpointError(
            f"{folder}: all {len(findings)} checkpoints are damaged; the newest: {findings[0].cause}. "
            "Nothing was touched. Set overwrite_output_dir: true to start anew."
        )
    _set_aside([Path(finding.evidence["checkpoint"]) for finding in findings], "damaged")
    return Resume(newest, findings)


def _set_aside(checkpoints: list[Path], reason: str) -> None:
    """Rename checkpoints, so that they are neither counted nor found again."""
    for path in checkpoints:
        path.rename(path.with_name(f"{reason}-{path.name}-{time.time_ns()}"))
    if checkpoints:
        sync(checkpoints[0].parent)


def set_aside_after(run_folder: Path, step: int) -> list[str]:
    """Rename the checkpoints of later steps, which a run that resumes from before has left, and return their names.

    They are neither counted nor found again: they would be taken for newer than the checkpoints from now on.
    """
    later = [path for path in list_checkpoints(run_folder) if step_of(path) > step]
    _set_aside(later, "left")
    return [path.name for path in later]


def _refuse_own_inputs(loaded: LoadedConfig) -> None:
    config, folder = loaded.run, loaded.run.run_folder.resolve()
    inputs = {
        "model": [config.model],
        "dataset": [item.path for item in config.dataset],
        "eval_dataset": [item.path for item in config.eval_dataset or ()],
        "a file of code": config.code_files(),
        **{name: [getattr(config, name)] for name in ("init_adapter", "chat_template", "image_dir", "dataset_dir")},
    }
    for name, values in inputs.items():
        for value in values:
            if value and Path(value).resolve().is_relative_to(folder):
                raise ConfigError(
                    f"overwrite_output_dir would delete {name}={value}, which this run reads "
                    f"({loaded.where('overwrite_output_dir', name)}). Choose another output_dir."
                )


def _refuse_other_run(loaded: LoadedConfig) -> tuple[str, ...]:
    """Raise CheckpointError if the run in `output_dir` is another run; return notes on how that was decided."""
    config, folder, where = loaded.run, loaded.run.run_folder, loaded.where("output_dir")
    ways = "Choose another output_dir, or set overwrite_output_dir: true to delete that run"
    if config.resume_from_checkpoint is False:
        raise CheckpointError(
            f"output_dir={folder} already holds a run, and resume_from_checkpoint is false. {ways} ({where})."
        )
    try:
        saved, notes = saved_config(folder)
    except ValueError as error:
        raise CheckpointError(
            f"output_dir={folder} holds a run whose run.yaml cannot be read: {error}. {ways} ({where})."
        ) from error
    changes = changed_fields(saved, config)
    if changes and all(change.partition(":")[0] in ("max_steps", "num_train_epochs") for change in changes):
        name, artifact = ("init_adapter", "adapter") if config.tuning == "lora" else ("model", "model")
        source = str(folder / artifact)
        if not Path(source).is_dir():  # the run was interrupted
            source = "that FOLDER"
        raise CheckpointError(
            f"output_dir={folder} holds a run of another length: {'; '.join(changes)}. With lr_scheduler_type: "
            f"{config.lr_scheduler_type} and warmup_ratio: {config.warmup_ratio:g} the learning rates would change. "
            f"`surefoot export {folder} FOLDER` keeps what it has learned. To go on, begin a new run from it, with "
            f"{name}: {source} and another output_dir. overwrite_output_dir: true deletes it ({where})."
        )
    if changes:
        has_result = any((folder / name).exists() for name in ("adapter", "model"))
        only_logs = "" if has_result or list_checkpoints(folder) else ", which has only logs so far"
        raise CheckpointError(
            f"output_dir={folder} holds another run; it differs in {'; '.join(changes)}. {ways}{only_logs} ({where})."
        )
    return notes


def saved_config(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings of the run in a folder, and notes on where they are from.

    They are those of its newest checkpoint if run.yaml is damaged. Raises: ValueError if neither can be read.
    """
    try:
        return read_saved_config(folder / "run.yaml"), ()
    except ValueError as error:
        newest = newest_manifest(folder)
        if newest is None:
            raise
        checkpoint, manifest = newest
        return manifest["config"], (f"{error}; the settings of {checkpoint.name} are taken instead",)


def read_saved_config(path: Path) -> dict[str, Any]:
    """Return the settings that a run wrote into its folder, unchecked except those that are calculated with.

    Raises: ValueError for a file that cannot be read or that no run wrote.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise ValueError(f"{path} is unreadable (it is not a file)")
    try:
        saved = parse_yaml(read_text(path), path.name)
    except ConfigError as error:
        raise ValueError(f"{path} is unreadable ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), str):
        raise ValueError(f"{path} is unreadable (it holds no settings of a run)")
    wrong = wrong_size(saved)
    if wrong is not None:
        raise ValueError(f"{path} is unreadable ({wrong})")
    return saved
