"""Writing files so that a crash, lost power, a kill or a full disk never leaves half a file. Standard library only.

Each file is written under a temporary name beside its target, synced and renamed; then the folder is synced as well.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surefoot.errors import InputError, StorageError


def cache_folder() -> Path:
    """Return the folder of fetched models and prepared data: `$SUREFOOT_CACHE`, else `~/.cache/surefoot`.

    Raises: InputError if the home folder is unknown.
    """
    text = os.environ.get("SUREFOOT_CACHE", "~/.cache/surefoot")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"SUREFOOT_CACHE={text}: {error} Set it to a folder that can be written.") from error


LEFTOVER = re.compile(r"^\.(?P<target>.+)\.\d+-[0-9a-f]{8}\.(?P<kind>tmp|old)$")
"""Names of the temporary files that this module writes beside a target, and of the old folders it replaces."""
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and make their names durable. Raises: OSError."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in created:
        with suppress(PermissionError):  # a folder that is writable but not readable cannot be opened to sync it
            sync(path.parent)


def sync(path: Path) -> None:
    """Make the bytes of a file, or the entries of a folder itself (names, renames), durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` atomically. Raises: StorageError, see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically.

    Raises: StorageError if the file system refuses; the old file stays.
    """
    temporary = _temporary_path(path, "tmp")
    try:
        make_folder(path.parent)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):  # if this is refused too, the first error names the reason
            temporary.unlink()
        raise storage_error(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically. NaN and infinity are refused, because JSON has neither."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it is synced and becomes `target`, on failure it is removed.

    An existing `target` is replaced only after the new one is complete, so the old or the new one always exists.
    Raises: StorageError if the file system refuses; InputError if a file that is copied into it cannot be read.
    """
    temporary = _temporary_path(target, "tmp")
    try:
        make_folder(target.parent)
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file() or path.is_dir():
                sync(path)
        sync(temporary)
        replace_folder(target, temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and _is_read_error(error, target, temporary):
            raise InputError(
                f"{os.fsdecode(error.filename)}: cannot be read: {error.strerror}. {target} was not written."
            ) from error
        if isinstance(error, OSError):
            raise storage_error(target, error) from error
        if type(error).__name__ == "SafetensorError" and "os error" in str(error).lower():  # not an OSError
            raise storage_error(target, OSError(errno.EIO, str(error))) from error
        raise


def replace_folder(target: Path, complete: Path) -> None:
    """Rename `complete` to `target` and make that durable, then delete the folder, or the link to it, that it replaces.

    Raises: OSError; the old folder stays.
    """
    if not target.exists():
        os.replace(complete, target)
        sync(target.parent)
        return
    if not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    replaced = complete
    if not exchange_folders(complete, target):
        replaced = _temporary_path(target, "old")
        os.replace(target, replaced)
        try:
            os.replace(complete, target)
        except OSError:
            os.replace(replaced, target)
            raise
    sync(target.parent)
    with suppress(OSError):
        delete(replaced)


def exchange_folders(first: Path, second: Path) -> bool:
    """Swap the names of two folders atomically; return False if the file system cannot.

    Source: renameat2(2); NFS and Lustre do not have it.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    status: int = renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return status == 0


def repair_folder(folder: Path) -> None:
    """Delete what interrupted writes left in a folder, and restore what they were about to replace.

    Only the process that holds `folder` may call this. Raises: OSError.
    """
    for path in folder.iterdir():
        leftover = LEFTOVER.match(path.name)
        if leftover is None:
            continue
        target = path.with_name(leftover["target"])
        if leftover["kind"] == "tmp" or target.exists():
            delete(path)
        else:
            os.replace(path, target)
            sync(folder)


def delete(path: Path) -> None:
    """Delete a file, a link (not its target), or a folder with all that is in it. Raises: OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _temporary_path(target: Path, kind: str) -> Path:
    """Return a new path beside a target, with random digits: machines that share a folder may repeat process IDs."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}")


def _is_read_error(error: OSError, target: Path, temporary: Path) -> bool:
    """Return whether the error names a file outside the folder that is filled and outside the path to it."""
    if not isinstance(error.filename, str | bytes):
        return False
    path = Path(os.fsdecode(error.filename))
    return not (path.is_relative_to(temporary) or target.is_relative_to(path) or temporary.is_relative_to(path))


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the system's refusal to write `path`, with the free space of its file system if that can be queried."""
    place = "folder for the cache with SUREFOOT_CACHE" if path.is_relative_to(cache_folder()) else "folder"
    advice = f"{'Free space or choose' if error.errno in (errno.ENOSPC, errno.EDQUOT) else 'Choose'} another {place}"
    limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and limit_bytes != resource.RLIM_INFINITY:
        advice = f"No file of this process may exceed {limit_bytes} bytes. Raise that limit (ulimit -f unlimited)"
    free_space = ""
    with suppress(OSError):  # a mount that has disappeared cannot be queried
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        free_space = f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB free on its file system)"
    return StorageError(
        f"{path}: could not be written: {error.strerror or error}{free_space}. "
        f"Existing files were not touched. {advice}, then run again."
    )


@contextmanager
def raise_storage_error(path: Path) -> Iterator[None]:
    """Raise StorageError for `path` if the system refuses an operation of the block."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex. The file is read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
