"""Settings that are given in Python, which ranks, workers and resumed runs read from files.

Rows become a file of the cache, and functions are named by the file that they are in.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
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
    """Return settings in which rows, as a list of mappings or a `datasets.Dataset`, and functions are named by files.

    Raises: ConfigError for rows that JSON cannot hold, and functions that no other process can import; StorageError.
    """
    for name in ("dataset", "eval_dataset"):
        if isinstance(settings.get(name), list) and not settings[name]:
            raise ConfigError(f"{name} is an empty list: it has no rows. Give a list of mappings, or files.")
    rows = {name: settings[name] for name in ("dataset", "eval_dataset") if _are_rows(settings.get(name))}
    files: dict[str, Any] = {name: _write_rows(name, value) for name, value in rows.items()}
    if isinstance(settings.get("reward_funcs"), list):
        files["reward_funcs"] = [_name_reward(reward) for reward in settings["reward_funcs"]]
    return {**settings, **files}


def _name_reward(reward: Any) -> Any:
    """Return an item of `reward_funcs` in which a function is named as file.py:function."""
    if isinstance(reward, Mapping) and callable(reward.get("func")):
        return {**reward, "func": _name_function(reward["func"])}
    return _name_function(reward) if callable(reward) else reward


def _name_function(function: Callable[..., Any]) -> str:
    """Return a function of a module as file.py:function. Raises: ConfigError for any other function."""
    name, module = getattr(function, "__qualname__", repr(function)), inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    if file is None or getattr(module, "__name__", None) == "__main__" or getattr(module, name, None) is not function:
        raise ConfigError(
            f"reward_funcs: {name} cannot be imported by the processes that score completions, because it is not a "
            f"function of a module. Put it into a file of its own, such as rewards.py, and write reward_funcs="
            f"['rewards.py:{name.rpartition('.')[2]}']."
        )
    return f"{file}:{name}"


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
