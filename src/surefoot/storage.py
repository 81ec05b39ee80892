"""Writing files so that a crash, a kill or a full disk never leaves half a file. Standard library only.

Everything goes to a temporary name beside its target, is synced, and is renamed.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surefoot.errors import InputError, StorageError


def cache_folder() -> Path:
    """Where fetched models and prepared data are kept: `$SUREFOOT_CACHE`, else `~/.cache/surefoot`."""
    return Path(os.environ.get("SUREFOOT_CACHE", "~/.cache/surefoot")).expanduser()


def sync_folder(folder: Path) -> None:
    """Make the entries of `folder` itself (names, renames) durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the bytes of one file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all. Raises: StorageError, see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, whole or not at all.

    Raises: StorageError where the file system refuses; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # where even that is refused, the first error says why
            temporary.unlink()
        raise storage_error(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, whole or not at all. NaN and infinity are refused: they are no JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; on success it is synced and becomes `target`, on failure it is removed.

    An existing `target` is replaced only after the new one is complete: it is there, old or new, whatever happens.
    Raises: StorageError where the file system refuses; InputError where what is read to fill it cannot be.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                sync_file(path)
            elif path.is_dir():
                sync_folder(path)
        sync_folder(temporary)
        replace_folder(target, temporary, replaced)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and _is_of_reading(error, target, temporary):
            raise InputError(
                f"{os.fsdecode(error.filename)}: cannot be read: {error.strerror}. {target} was not written."
            ) from error
        if isinstance(error, OSError):
            raise storage_error(target, error) from error
        if type(error).__name__ == "SafetensorError" and "os error" in str(error).lower():  # it is no OSError
            raise storage_error(target, OSError(errno.EIO, str(error))) from error
        raise


def replace_folder(target: Path, complete: Path, replaced: Path) -> None:
    """Put a folder in the place of another one, which has the name `replaced` meanwhile. Raises: OSError."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    try:
        if target.exists():
            os.replace(target, replaced)
        os.replace(complete, target)
        sync_folder(target.parent)
    finally:
        if replaced.exists() and not target.exists():
            os.replace(replaced, target)
        elif replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def _is_of_reading(error: OSError, target: Path, temporary: Path) -> bool:
    """Whether it names a file that is neither in the folder that is filled nor on the way to it."""
    if not isinstance(error.filename, str | bytes):
        return False
    named = Path(os.fsdecode(error.filename))
    return not (named.is_relative_to(temporary) or target.is_relative_to(named) or temporary.is_relative_to(named))


def storage_error(path: Path, error: OSError) -> StorageError:
    """The system's refusal to write `path`, with the room that is left on its file system."""
    place = "folder for the cache with SUREFOOT_CACHE" if path.is_relative_to(cache_folder()) else "output_dir"
    advice = "Free space or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    free_mib = shutil.disk_usage(folder).free / 2**20
    return StorageError(
        f"{path}: could not be written: {error.strerror or error} ({free_mib:.0f} MiB free on its file system). "
        f"Nothing that was there before was touched. {advice} another {place}, then run again."
    )


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
