"""Hubs that models are fetched from: Hugging Face's, and ModelScope with `modelscope:ID` or USE_MODELSCOPE=1."""

import os
from collections.abc import Sequence
from pathlib import Path

from surefoot.errors import ModelError

MODELSCOPE = "modelscope:"
IGNORED = ["original/*", "consolidated*"]
"""Files of a repository that hold its weights a second time."""


def repository_of(source: str) -> str:
    """Return the id of a model in its hub."""
    return source.removeprefix(MODELSCOPE)


def is_on_modelscope(source: str) -> bool:
    """Return whether a hub id is one of ModelScope."""
    return source.startswith(MODELSCOPE) or os.environ.get("USE_MODELSCOPE", "").lower() in ("1", "true")


def fetch(source: str, patterns: Sequence[str], where: str) -> Path:
    """Return the folder of a repository's files that match patterns, fetched if needed.

    Raises: ModelError if the package of the hub is missing; whatever the hub's client raises.
    """
    if not is_on_modelscope(source):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=list(patterns), ignore_patterns=IGNORED))
    return _download_from_modelscope(source, patterns, where, only_local=bool(os.environ.get("HF_HUB_OFFLINE")))


def find_cached(source: str) -> Path | None:
    """Return the folder of a repository whose config.json is on this machine; None if there is none."""
    if is_on_modelscope(source):
        try:
            folder = _download_from_modelscope(source, ["config.json"], source, only_local=True)
        except Exception:  # noqa: BLE001 - its client raises many types where nothing is cached
            return None
        return folder if (folder / "config.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(source, "config.json")
    except ValueError:  # invalid as a hub name
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _download_from_modelscope(source: str, patterns: Sequence[str], where: str, *, only_local: bool) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"model={source} is an id of ModelScope, which needs its package: pip install modelscope ({where})."
        ) from error
    folder = snapshot_download(
        repository_of(source), allow_patterns=list(patterns), ignore_patterns=IGNORED, local_files_only=only_local
    )
    return Path(folder)
