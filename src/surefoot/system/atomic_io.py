"""Writing files so that a crash, lost power, a kill or a full disk never leaves half a file. Standard library only.

Everything goes to a temporary name beside its target, is synced, and is renamed; then the folder is synced as well.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surefoot.errors import InputError, StorageError


def cache_folder() -> Path:
    """Return where fetched models and prepared data are kept: `$SUREFOOT_CACHE`, else `~/.cache/surefoot`.

    Raises: InputError where the home folder is unknown.
    """
    text = os.environ.get("SUREFOOT_CACHE", "~/.cache/surefoot")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"SUREFOOT_CACHE={text}: {error} Set it to a folder that can be written.") from error


LEFTOVER = re.compile(r"^\.(?P<target>.+)\.\d+-[0-9a-f]{8}\.(?P<kind>tmp|old)$")
"""Names of what this module writes beside a target, and of what it replaces there."""
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def make_folder(folder: Path) -> None:
    """Create a folder with those above it, and make their names durable. Raises: OSError."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in created:
        with suppress(PermissionError):  # a folder that may be written to but not listed cannot be opened to sync it
            sync_folder(path.parent)


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
    temporary = _beside(path, "tmp")
    try:
        make_folder(path.parent)
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
    temporary = _beside(target, "tmp")
    try:
        make_folder(target.parent)
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                sync_file(path)
            elif path.is_dir():
                sync_folder(path)
        sync_folder(temporary)
        replace_folder(target, temporary)
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


def replace_folder(target: Path, complete: Path) -> None:
    """Rename `complete` to `target` and make that durable, then delete the folder, or the link to one, of this name.

    Raises: OSError; the old folder stays.
    """
    if not target.exists():
        os.replace(complete, target)
        sync_folder(target.parent)
        return
    if not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    replaced = complete
    if not exchange_folders(complete, target):
        replaced = _beside(target, "old")
        os.replace(target, replaced)
        try:
            os.replace(complete, target)
        except OSError:
            os.replace(replaced, target)
            raise
    sync_folder(target.parent)
    with suppress(OSError):
        delete(replaced)


def exchange_folders(first: Path, second: Path) -> bool:
    """Swap the names of two folders at once; return False where the file system cannot.

    Source: renameat2(2); NFS and Lustre do not have it.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    status: int = renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return status == 0


def repair_folder(folder: Path) -> None:
    """Delete what writes that were cut short have left in a folder, and put back what they were about to replace.

    Only for the process that holds `folder`. Raises: OSError.
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
            sync_folder(folder)


def delete(path: Path) -> None:
    """Delete a file, a link (not what it leads to), or a folder with all that is in it. Raises: OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _beside(target: Path, kind: str) -> Path:
    """Return a new name beside a target; machines that share a folder may have processes of equal numbers."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{kind}")


def _is_of_reading(error: OSError, target: Path, temporary: Path) -> bool:
    """Whether it names a file that is neither in the folder that is filled nor on the way to it."""
    if not isinstance(error.filename, str | bytes):
        return False
    named = Path(os.fsdecode(error.filename))
    return not (named.is_relative_to(temporary) or target.is_relative_to(named) or temporary.is_relative_to(named))


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the system's refusal to write `path`, with the room that is left on its file system if that answers."""
    place = "folder for the cache with SUREFOOT_CACHE" if path.is_relative_to(cache_folder()) else "output_dir"
    advice = "Free space or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
    room = ""
    with suppress(OSError):  # a mount that is gone answers nothing
        folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
        room = f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB free on its file system)"
    return StorageError(
        f"{path}: could not be written: {error.strerror or error}{room}. "
        f"Nothing that was there before was touched. {advice} another {place}, then run again."
    )


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
