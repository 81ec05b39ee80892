"""Hubs of models: Hugging Face's, and ModelScope with `modelscope:ID` or USE_MODELSCOPE=1."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from surefoot.errors import ModelError, one_line

MODELSCOPE = "modelscope:"
REPOSITORY = re.compile(r"^[\w.-]+/[\w.-]+$")
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


def check_may_push(repository: str, where: str) -> None:
    """Raise ModelError if nothing could be uploaded: an invalid name, a missing package or no token."""
    if not REPOSITORY.match(repository_of(repository)):
        raise ModelError(
            f"{repository} is no name of a repository. Write user/name, or modelscope:user/name ({where})."
        )
    if is_on_modelscope(repository):
        _require_modelscope(repository, where)
        if not os.environ.get("MODELSCOPE_API_TOKEN") and not _has_modelscope_login():
            raise ModelError(
                f"uploading to ModelScope needs a token: `modelscope login --token ...`, or set MODELSCOPE_API_TOKEN "
                f"({where})."
            )
        return
    from huggingface_hub import get_token

    if get_token() is None:
        raise ModelError(f"uploading to the hub needs a token: `hf auth login`, or set HF_TOKEN ({where}).")


def push(folder: Path, repository: str, *, is_private: bool, where: str) -> str:
    """Upload the files of a folder to a repository, which is created if it does not exist; return its address.

    Raises: ModelError if the upload fails, with the hub's reason.
    """
    check_may_push(repository, where)
    name = repository_of(repository)
    try:
        if is_on_modelscope(repository):
            from modelscope.hub.api import HubApi

            hub = HubApi()
            hub.create_repo(name, visibility="private" if is_private else "public", exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=str(folder))
            return f"https://modelscope.cn/models/{name}"
        from huggingface_hub import HfApi

        hub = HfApi()
        address = hub.create_repo(name, private=is_private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by Surefoot")
        return str(address)
    except Exception as error:  # the clients of hubs raise errors of many libraries
        raise ModelError(f"{folder} was not uploaded to {repository}: {one_line(error)} ({where}).") from error


def _has_modelscope_login() -> bool:
    from modelscope.hub.api import ModelScopeConfig

    return ModelScopeConfig.get_token() is not None


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


def require_package(source: str, where: str) -> None:
    """Raise ModelError if a model is on ModelScope and its package is not installed."""
    if is_on_modelscope(source):
        _require_modelscope(source, where)


def _require_modelscope(source: str, where: str) -> None:
    try:
        import modelscope  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"{source} is an id of ModelScope, which needs its package: pip install modelscope ({where})."
        ) from error


def _download_from_modelscope(source: str, patterns: Sequence[str], where: str, *, only_local: bool) -> Path:
    _require_modelscope(source, where)
    from modelscope import snapshot_download

    folder = snapshot_download(
        repository_of(source), allow_patterns=list(patterns), ignore_patterns=IGNORED, local_files_only=only_local
    )
    return Path(folder)
