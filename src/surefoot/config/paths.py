"""Paths in settings. Only this module resolves and checks them, so no path causes an unhandled file-system error."""

import errno
import os
import re
import stat
from pathlib import Path

from surefoot.config.documents import MOST_BYTES, shorten
from surefoot.errors import ConfigError

MOST_PATH_BYTES = 3500
"""Largest length of a path: Linux allows 4,095 bytes, and a run writes files inside its folders."""
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
"""An environment variable in a path: `$NAME` or `${NAME}`."""
ABSENT = (errno.ENOENT, errno.ENOTDIR)
KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
"""Directories of special files: reading one may never end, and a second read returns other bytes."""
FOLDERS = (
    "model", "output_dir", "dataset_dir", "image_dir", "init_adapter", "resume_from_checkpoint", "teacher_model",
)  # fmt: skip
"""Settings that name a folder, never a file."""


def resolve_path(value: str, base: Path, name: str, place: str) -> Path:
    """Return the absolute path of a setting; relative paths start from `base`. The path need not exist.

    `~` and environment variables are replaced. Raises: ConfigError for an invalid path, for a variable that is not set,
    and for a device, a pipe or a socket.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{name}={shorten(value, quote=False)}: {reason} ({place}).")

    missing = [variable for variable in VARIABLE.findall(value) if variable not in os.environ]
    if missing:
        raise refuse(f"the environment variable {missing[0]} is not set. Set it, or write the path without it")
    try:
        path = Path(base, Path(os.path.expandvars(value)).expanduser()).resolve()
        if len(os.fsencode(path)) > MOST_PATH_BYTES:
            raise refuse(f"the path is longer than {MOST_PATH_BYTES} bytes")
        str(path).encode()
        mode = path.stat().st_mode
    except UnicodeEncodeError:
        raise refuse("the path is no UTF-8 text, so no file of the run could name it. Rename its folder") from None
    except PermissionError:  # the process that reads the file reports it
        return path
    except OSError as error:
        if error.errno in ABSENT:
            return path
        raise refuse(f"no such path is possible: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:  # unknown user's home folder, circular links, a NUL
        raise refuse(str(error).rstrip(".")) from error
    kind = KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        instead = "Give a folder" if name in FOLDERS else "Give a file: it is read more than once"
        raise refuse(f"it is {kind}, not a file or folder. {instead}")
    return path


def check_template_size(path: Path, place: str) -> None:
    """Raise ConfigError if the file of a chat template is larger than any template."""
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise ConfigError(
            f"chat_template={path}: {path.stat().st_size} bytes, and a template has at most {MOST_BYTES} ({place})."
        )
