"""Operators of bitsandbytes, which is optional and is imported where it is used."""

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from surefoot.errors import ModelError

PACKAGE = "bitsandbytes"
OLDEST = (0, 46)
"""First version of bitsandbytes that registers its arithmetic as operators of torch."""


def check_package(setting: str, instead: str) -> None:
    """Raise ModelError if bitsandbytes is missing or too old. `instead`: a remedy that needs no package."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError as error:
        raise ModelError(
            f"{setting} needs {PACKAGE}, which is not installed. `pip install 'surefoot[quantized]'` installs it; "
            f"{instead}."
        ) from error
    if tuple(int(part) for part in installed.split(".")[:2] if part.isdigit()) < OLDEST:
        raise ModelError(
            f"{setting} needs {PACKAGE} {'.'.join(map(str, OLDEST))} or newer, and {installed} is installed. "
            f"`pip install -U 'surefoot[quantized]'` installs it; {instead}."
        )


def operators() -> Any:
    """Return bitsandbytes' operators."""
    log = logging.getLogger(PACKAGE)
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of an optional kernel that is not used here
    try:
        import bitsandbytes  # noqa: F401 - it registers the operators
    finally:
        log.setLevel(level)
    return torch.ops.bitsandbytes
