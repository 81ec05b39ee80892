"""Manifest of a checkpoint: it verifies itself, and it names every file that the checkpoint needs.

    {"format_version": 4, "surefoot_version": "...", "step": 100, "config": {...},
     "files": {"model/rank-00000.safetensors": SHA-256, "optimizer/...": SHA-256, "state.json": SHA-256},
     "sha256": SHA-256 of the other keys as canonical JSON}

Format 3 is the same without `sha256`. Every later format keeps `format_version` and `sha256` as they are here, so a
newer format can be distinguished from a damaged manifest.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import CheckpointError
from surefoot.system.atomic_io import sha256_of
from surefoot.system.json_files import DamagedFile, is_count, is_size, read_object

FORMAT_VERSION = 4
READABLE_VERSIONS = (3, 4)
MANIFEST, STATE = "manifest.json", "state.json"
PARTS = ("model", "optimizer")
NAME = re.compile(r"^step-(\d{8})\Z")
FILE_NAME = re.compile(rf"({'|'.join(PARTS)})/rank-(\d{{5}})\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
KEYS = frozenset(("format_version", "surefoot_version", "step", "config", "files"))
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")
"""Settings that a resume calculates with."""
SHOWN_CHARACTERS = 80


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own checksum."""
    return {**manifest, "sha256": _compute_digest(manifest)}


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest after verifying its checksum; the files it names are not checked.

    Raises: DamagedFile; CheckpointError for a genuine manifest of a newer format.
    """
    manifest = read_object(checkpoint / MANIFEST)
    _check_version(checkpoint, manifest)
    for problem in _list_problems(checkpoint, manifest):
        raise DamagedFile(f"{checkpoint / MANIFEST} {problem}")
    return manifest


def refuse_unreadable(path: Path) -> None:
    """Raise CheckpointError if this user may not read a file or folder: missing permission is not damage."""
    try:
        may_read = os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)) or not path.exists()
    except PermissionError:  # of a parent folder
        may_read = False
    if not may_read:
        raise CheckpointError(f"{path}: permission denied. Give this user the right to read it. Nothing was set aside.")


def check_files(checkpoint: Path, files: Mapping[str, str]) -> None:
    """Raise DamagedFile unless each named file has its checksum, and no other file of tensors is beside them.

    Hidden files, which file systems and desktops leave, and notes that a person adds are not read and do no harm.
    """
    home = checkpoint.resolve()
    for name in files:
        path = checkpoint / name
        try:
            is_file = stat.S_ISREG(path.stat().st_mode)
            is_outside = not path.resolve().is_relative_to(home)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedFile(f"{path} is missing") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: circular links
            raise DamagedFile(f"{path} cannot be read: {error}") from error
        if not is_file:
            raise DamagedFile(f"{path} is not a file")
        refuse_unreadable(path)
        if is_outside:
            raise DamagedFile(f"{path} is a link to a file outside the checkpoint: {path.resolve()}")
    for name in _list_tensor_files(checkpoint):
        if name not in files:
            raise DamagedFile(f"{checkpoint / name} is not named in {MANIFEST}")
    for name, digest in files.items():
        path = checkpoint / name
        try:
            is_same = sha256_of(path) == digest
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read: {error.strerror}") from error
        if not is_same:
            raise DamagedFile(f"{path} does not match its checksum")


def wrong_size(config: Mapping[str, Any]) -> str | None:
    """Return a text that names an invalid setting that a resume calculates with; None if all are valid."""
    wrong = next((key for key in SIZES if config.get(key) is not None and not is_size(config[key])), None)
    return f"{wrong} is {_format_value(config[wrong])}" if wrong is not None else None


def _compute_digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _check_version(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    version, path = manifest.get("format_version"), checkpoint / MANIFEST
    if not is_count(version):
        raise DamagedFile(f"{path} has format_version {_format_value(version)}, which is no version number")
    assert isinstance(version, int)
    try:
        is_sealed = manifest.get("sha256") == _compute_digest(manifest)
    except ValueError as error:  # a number beyond all floats, such as 1e400
        raise DamagedFile(f"{path} is unreadable ({error})") from error
    if version >= FORMAT_VERSION and not is_sealed:
        raise DamagedFile(f"{path} does not match its own checksum")
    if version > FORMAT_VERSION:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        raise CheckpointError(
            f"{checkpoint} has format version {version}; this Surefoot reads {readable}. "
            f"Use a newer version: surefoot {str(manifest.get('surefoot_version'))[:SHOWN_CHARACTERS]} wrote it."
        )
    if version not in READABLE_VERSIONS:
        raise DamagedFile(f"{path} has format_version {version}, which no Surefoot wrote that this one can read")


def _list_problems(checkpoint: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a manifest whose version can be read."""
    keys = KEYS | {"sha256"} if manifest["format_version"] >= FORMAT_VERSION else KEYS
    for key in sorted(keys ^ manifest.keys()):
        yield f"has no {key}" if key in keys else f"has the unknown key {_format_value(key)}"
    step, config, files = manifest["step"], manifest["config"], manifest["files"]
    name = NAME.match(checkpoint.name)
    if not is_count(step) or not NAME.match(f"step-{step:08d}"):
        yield f"has step {_format_value(step)}, which is no step"
    elif name and int(name[1]) != step:
        yield f"is of step {step}, and the folder is named {checkpoint.name}"
    if not isinstance(config, dict):
        yield "has a config that is no object"
    elif wrong := wrong_size(config):
        yield f"has a config in which {wrong}"
    yield from _list_file_problems(files)


def _list_file_problems(files: Any) -> Iterator[str]:
    if not isinstance(files, dict):
        yield "has files that are no object"
        return
    ranks: dict[str, set[int]] = {part: set() for part in PARTS}
    for name, digest in files.items():
        match = FILE_NAME.fullmatch(name)
        if match:
            ranks[match[1]].add(int(match[2]))
        elif name != STATE:
            yield f"names {_format_value(name)}, which is no file of a checkpoint"
        if not isinstance(digest, str) or not SHA256.fullmatch(digest):
            yield f"has {_format_value(digest)} as the SHA-256 of {_format_value(name)}"
    if STATE not in files:
        yield f"does not name {STATE}"
    num_ranks = 1 + max((rank for numbers in ranks.values() for rank in numbers), default=0)
    for part in PARTS:
        missing = next((rank for rank in range(num_ranks) if rank not in ranks[part]), None)
        if missing is not None:
            yield f"does not name {part}/rank-{missing:05d}.safetensors"


def _list_tensor_files(checkpoint: Path) -> Iterator[str]:
    """Yield the relative paths of the files in the folders of tensors that are not hidden."""
    try:
        for part in PARTS:
            names = sorted(path.name for path in (checkpoint / part).iterdir())
            yield from (f"{part}/{name}" for name in names if not name.startswith("."))
    except OSError as error:
        raise DamagedFile(f"{checkpoint} cannot be read: {error.strerror}") from error


def _format_value(value: Any) -> str:
    """Return a value for a message, cut."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
