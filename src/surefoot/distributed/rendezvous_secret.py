"""Secret that the launchers of a run on several machines prove to each other, and its distribution.

The launcher that serves writes a new secret into the run folder, which all machines share, and deletes it at the end.
If that folder is not shared, `SUREFOOT_RENDEZVOUS_SECRET` gives the same secret to each.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.system.atomic_io import storage_error, sync

VARIABLE = "SUREFOOT_RENDEZVOUS_SECRET"
FILE = ".rendezvous-secret"
LEAST_CHARACTERS, LEAST_DIFFERENT = 16, 8
MOST_BYTES = 4096


def secret_of_environment() -> str | None:
    """Return the secret that the environment gives, if any. Raises: ConfigError if it is too easy to guess."""
    secret = os.environ.get(VARIABLE)
    if secret is not None and (len(secret) < LEAST_CHARACTERS or len(set(secret)) < LEAST_DIFFERENT):
        raise ConfigError(
            f"{VARIABLE} has {len(secret)} characters, {len(set(secret))} of them different, and a secret needs at "
            f"least {LEAST_CHARACTERS} and {LEAST_DIFFERENT}. Generate one with `openssl rand -hex 32` and set the "
            "same on all machines."
        )
    return secret


@contextmanager
def hidden_from_children() -> Iterator[None]:
    """Keep the secret out of the environment of processes that are started meanwhile."""
    secret = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if secret is not None:
            os.environ[VARIABLE] = secret


def read_secret(run_folder: Path) -> str | None:
    """Return the secret that the serving launcher wrote; None if this machine does not see the file."""
    try:
        with open(run_folder / FILE, "rb") as file:
            return file.read(MOST_BYTES).decode("ascii", "replace") or None
    except OSError:
        return None


@contextmanager
def shared_secret(run_folder: Path) -> Iterator[str]:
    """Write a new secret into the run folder, readable by its owner alone, and delete it at the end.

    Folders that were created for it are removed again if nothing else is in them. Raises: StorageError.
    """
    new_folders = [folder for folder in (run_folder, *run_folder.parents) if not folder.exists()]
    path = run_folder / FILE
    temporary = path.with_name(f"{FILE}.{os.getpid()}.tmp")
    secret = secrets.token_hex(32)
    try:
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secret)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync(run_folder)
        except OSError as error:
            raise storage_error(path, error) from error
        yield secret
    finally:
        with suppress(OSError):  # on a failing file system the secret may stay: it is of no use after this run
            temporary.unlink(missing_ok=True)
            if read_secret(run_folder) == secret:  # another launcher may serve there by now
                path.unlink()
        for folder in new_folders:
            with suppress(OSError):
                folder.rmdir()
