"""Settings and rows that are given in Python. Rows become a file of the cache, which ranks and resumed runs read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.config import LoadedConfig, load_config
from surefoot.errors import ConfigError
from surefoot.system.atomic_io import cache_folder, write_bytes


def load_given(
    config: str | Path | Mapping[str, Any], overrides: Sequence[str], settings: Mapping[str, Any]
) -> LoadedConfig:
    """Return the checked config of a YAML file or a mapping, with `settings` on top. Raises: ConfigError."""
    if isinstance(config, Mapping):
        return load_config(None, overrides, _as_files({**config, **settings}))
    return load_config(config, overrides, _as_files(settings))


def _as_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which rows, as a list of mappings or a `datasets.Dataset`, are replaced by their file.

    Raises: ConfigError for rows that JSON cannot hold; StorageError.
    """
    for name in ("dataset", "eval_dataset"):
        if isinstance(settings.get(name), list) and not settings[name]:
            raise ConfigError(f"{name} is an empty list: it has no rows. Give a list of mappings, or files.")
    rows = {name: settings[name] for name in ("dataset", "eval_dataset") if _are_rows(settings.get(name))}
    return {**settings, **{name: _write_rows(name, value) for name, value in rows.items()}}


def _are_rows(value: Any) -> bool:
    """Return whether a value holds rows, not paths or items with a path."""
    if hasattr(value, "column_names"):
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "path" not in value[0]


def _write_rows(setting: str, rows: Any) -> str:
    """Return the path of a file with these rows. Its folder is their hash, so the same rows are the same data.

    Errors quote its name: `dataset.jsonl:3` is the third row.
    """
    if isinstance(rows, Mapping):
        raise ConfigError(f"{setting}: this is a dict of splits ({', '.join(rows)}). Give one, such as rows['train'].")
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{setting}[{number}]: {error}. A row holds what JSON can: texts, numbers, lists and mappings; "
                "images as paths of files."
            ) from error
    content = "".join(lines).encode("utf-8", "backslashreplace")
    path = cache_folder() / "rows" / hashlib.sha256(content).hexdigest()[:32] / f"{setting}.jsonl"
    if not path.is_file():
        write_bytes(path, content)
    return str(path)
