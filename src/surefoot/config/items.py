"""Settings that are lists of items, such as data sets and reward functions: their forms, paths and errors."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from surefoot.config.documents import shorten
from surefoot.config.paths import resolve_path
from surefoot.config.schema import DatasetItem, Item


@dataclass
class Setting:
    """One value of a config, with its place."""

    value: Any
    place: str
    base: Path
    """Folder that relative paths in the value start from."""
    is_mapped: bool = False
    """Whether it was read from a config of another program."""

    def resolve(self, path: str, name: str) -> Path:
        """Return the absolute form of a path in the value. Raises: ConfigError, see `resolve_path`."""
        return resolve_path(path, self.base, name, self.place)

    @property
    def shown(self) -> str:
        """The value as messages show it."""
        return shorten(self.value, quote=False)


def find_item_class(field: FieldInfo) -> type[Item] | None:
    """Return the class of the entries of a list of items."""
    for part in (field.annotation, *get_args(field.annotation)):
        inner = get_args(part)
        if get_origin(part) is list and isinstance(inner[0], type) and issubclass(inner[0], Item):
            return inner[0]
    return None


def expand_dataset_items(setting: Setting, name: str, dataset_dir: Any) -> Any:
    """Return a dataset setting of any form as a list of items with absolute paths."""
    value = setting.value
    if value is None:
        return None
    if isinstance(value, str) and isinstance(dataset_dir, str):
        value = [entry.strip() for entry in value.split(",")]
    items = value if isinstance(value, list) else [value]
    if isinstance(dataset_dir, str):
        file = str(Path(dataset_dir, "dataset_info.json"))
        items = [{"path": file, "name": item} if isinstance(item, str) else item for item in items]
    return expand_items(items, DatasetItem, setting, name)


def expand_items(items: Sequence[Any], kind: type[Item], setting: Setting, name: str) -> list[Any]:
    """Return the entries of a list in any of their forms as items with absolute paths."""
    full: list[Any] = []
    for item in items:
        entry = {kind.text_key: item} if isinstance(item, str) else item
        text = entry.get(kind.text_key) if isinstance(entry, dict) else None
        if isinstance(text, str) and text:
            entry = {**entry, kind.text_key: kind.resolve(text, lambda path: setting.resolve(path, name))}
        full.append(entry)
    return full


def describe_item_error(item: Any, kind: type[Item]) -> str:
    """Return the text of an error in a setting that is a list of items."""
    key = shorten(str(item["loc"][-1]), quote=False)
    fields = kind.model_fields
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, list(fields), n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else f". Known: {', '.join(fields)}"
        return f": there is no such key{hint}"
    if item["type"] == "missing":
        return f" is missing. {fields[key].description}"
    if item["type"] == "string_too_short":
        return f" is empty. {fields[key].description}"
    if item["type"] == "model_type":
        return f" must be a text or {{{', '.join(fields)}}}, found {shorten(item['input'])}"
    return f": {rephrase_message(item['msg'])}, found {shorten(item['input'])}"


def rephrase_message(message: str) -> str:
    """Return a message of pydantic in the words of this project."""
    return message.replace("Input should be", "must be")
