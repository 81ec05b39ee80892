"""Resolution of a `dataset` setting to files: paths, folders, globs, LLaMA-Factory's dataset_info.json, and the hub.

This module does not read the files, and imports no torch.
"""

import difflib
import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from surefoot.config import DatasetItem, LoadedConfig
from surefoot.config.schema import HUB_ID, MessageTag
from surefoot.data.conversation import shown
from surefoot.data.file_readers import COMPRESSIONS, KINDS, kind_of
from surefoot.data.row_formats import FORMATS, LABELS, FormatSpec
from surefoot.errors import ConfigError, DataError, one_line
from surefoot.system.json_files import DamagedFile, is_size, read_object

COLUMNS = frozenset(name for row_format in FORMATS.values() for name in row_format.required | row_format.optional)
COLUMNS |= frozenset(LABELS)
"""Surefoot's names of columns."""
DataSetting = Literal["dataset", "eval_dataset"]
DATA_SETTINGS: tuple[DataSetting, ...] = ("dataset", "eval_dataset")
"""Settings that name data files."""
SPLIT = re.compile(r"^(?P<name>[\w.-]*)(\[(?P<begin>-?\d{1,12}%?)?:(?P<end>-?\d{1,12}%?)?\])?$", re.ASCII)
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "training", "testing", "evaluation")
CHINESE_MARKS = "\uff0c\u3001\uff1b\u201c\u201d\u2018\u2019"
"""Commas, semicolons and quotes that an input method types, and that YAML takes for letters."""
GIVE_DATA = "Give a file, a folder, a pattern such as data/*.jsonl, or a hub id"
NO_DATASETS = "dataset {}: no such file or folder, and hub datasets need the package datasets: pip install datasets"
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "config.json")
"""Names of files that `datasets` and LLaMA-Factory write beside data."""


@dataclass(frozen=True)
class RowRange:
    """A range of a source's rows, as in `train[10%:20%]`: bounds are row numbers or, with `%`, shares."""

    begin: str | None = None
    end: str | None = None

    def of(self, num_rows: int) -> tuple[int, int]:
        """Return the first row and the end of the range, for a source of `num_rows` rows."""
        return _resolve_bound(self.begin, num_rows, 0), _resolve_bound(self.end, num_rows, num_rows)


@dataclass(frozen=True)
class Source:
    """Files that are read one after the other in the same way."""

    files: tuple[Path, ...]
    names: tuple[str, ...]
    """Names of the files in places."""
    spec: FormatSpec
    weight: float = 1.0
    """Number of visits to each row in an epoch."""
    rows: RowRange = RowRange()


class _BadSource(Exception):
    """A source that cannot be used; the text says why."""


def find_sources(items: Sequence[DatasetItem], where: str = "dataset") -> list[Source]:
    """Return the sources of a dataset setting, in its order.

    `where` is shown in errors about the setting itself (`run.yaml:4`).
    Raises: DataError for sources that do not exist, have no data files, or cannot be fetched.
    """
    try:
        return [_resolve_source(item) for item in items]
    except _BadSource as error:
        raise DataError(f"{error} ({where}).") from error


def sources_of(loaded: LoadedConfig, setting: DataSetting, *, only_local: bool = False) -> list[Source]:
    """Return the files of a dataset setting and how to read their rows.

    Hub datasets are fetched; if `only_local`, they are left out, but their package must be here.
    Raises: DataError; ConfigError if files that the run writes would become rows.
    """
    config = loaded.run
    items: list[DatasetItem] = getattr(config, setting) or []
    for item in items:
        if may_list(item.path, config.run_folder):
            raise ConfigError(
                f"output_dir={config.output_dir} is inside {setting} {item.path}, whose subfolders are searched: the "
                "run's metrics.jsonl would be read as rows when it goes on. Give an output_dir elsewhere "
                f"({loaded.where('output_dir', setting)})."
            )
        if only_local and is_of_hub(item) and find_spec("datasets") is None:
            raise DataError(f"{NO_DATASETS.format(item.path)} ({loaded.where(setting)}).")
    resolved_items = [
        item.model_copy(
            update={
                "format": item.format if item.format != "auto" else config.dataset_format,
                "columns": item.columns or config.columns,
            }
        )
        for item in items
        if not (only_local and is_of_hub(item))
    ]
    sources = find_sources(resolved_items, loaded.where(setting))
    return [
        replace(
            source,
            spec=replace(
                source.spec,
                prompts=config.row.is_prompt,
                pairs=config.row.is_pair,
                labels=config.row.is_labelled,
                margins=config.row.has_margin,
                system=config.system,
            ),
        )
        for source in sources
    ]


def check_files_exist(loaded: LoadedConfig) -> None:
    """Check that the data files of a run exist, without reading them. Raises: DataError, ConfigError."""
    for setting in DATA_SETTINGS:
        sources_of(loaded, setting, only_local=True)


def _resolve_source(item: DatasetItem) -> Source:
    split = SPLIT.match(item.split or "")
    if split is None:
        raise _BadSource(f"split={item.split}: write a name, a range, or both: train, [:90%], train[:1000]")
    rows = RowRange(split["begin"], split["end"])
    unknown = sorted(set(item.columns) - COLUMNS)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(COLUMNS), n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else f". Known: {', '.join(sorted(COLUMNS))}."
        raise _BadSource(f"columns: '{unknown[0]}' is no column of any format{hint}")
    spec = FormatSpec(item.format, item.columns, {str(tag): name for tag, name in item.tags.items()})
    info = _info_file_of(item)
    if info is not None:
        return _resolve_info_entry(*_find_info_entry(*info), info[0].parent, item, rows)
    if is_of_hub(item):
        files = _load_from_hub(item.path, item.subset, split["name"] or "train")
        return Source(files, tuple(f"{item.path}/{file.name}" for file in files), spec, item.weight, rows)
    files = _find_local_files(item.path, split["name"])
    return Source(files, _make_unique_names(files), spec, item.weight, rows)


def is_of_hub(item: DatasetItem) -> bool:
    """Return whether a source names a hub dataset and no local file."""
    info = _info_file_of(item)
    if info is not None:
        try:
            _, entry = _find_info_entry(*info)
        except _BadSource:  # the error of the file is raised when it is resolved
            return False
        return "file_name" not in entry and "hf_hub_url" in entry
    path = Path(item.path)
    is_local = path.exists() or glob.has_magic(item.path) or kind_of(path)
    return not is_local and HUB_ID.match(item.path) is not None


def may_list(source: str, folder: Path) -> bool:
    """Return whether a source, a folder or a pattern, includes files that would be written into `folder`."""
    path = Path(source)
    if not path.is_dir():
        patterns = glob.has_magic(path.name) and glob.has_magic(str(path.parent))
        if path.exists() or not patterns:
            return False
        path = Path(re.split(r"[*?[]", source)[0] + "_").parent
    return folder.resolve().is_relative_to(path.resolve())


def _find_local_files(text: str, split: str) -> tuple[Path, ...]:
    path = Path(text)
    if path.is_dir():
        return _select_split(_list_folder(path), path, split, text)
    if glob.has_magic(text) and not path.exists():
        names = sorted(glob.iglob(text, recursive=True), reverse=True)  # noqa: PTH207 - the pattern may be absolute
        real = {Path(name).resolve(): Path(name) for name in names}  # each file once, even if links name it again
        files = tuple(sorted(path for target, path in real.items() if target.is_file()))
        if not files:
            raise _BadSource(f"dataset {text}: the pattern matches no file")
        for file in files:
            _check_kind(file)
        return _select_split(files, Path(text.partition("*")[0]).parent, split, text) if split else files
    try:
        path.stat()
    except FileNotFoundError:
        odd = next((character for character in CHINESE_MARKS if character in text), None)
        hint = f"{odd!r} is part of the name: write a list as [a.jsonl, b.jsonl]" if odd else GIVE_DATA
        raise _BadSource(f"dataset {text} does not exist. {hint}") from None
    except OSError as error:
        raise _BadSource(f"dataset {text} cannot be read: {error.strerror or error}") from error
    _check_kind(path)
    return _select_split((path,), path.parent, split, text) if split not in ("", "train") else (path,)


def _check_kind(path: Path) -> None:
    if kind_of(path) is None:
        supported = f"{', '.join(KINDS)}, texts also with {' or '.join(COMPRESSIONS)}"
        what = (
            f"'{path.suffix}' files are not read" if path.suffix else "its name has no ending, which tells the format"
        )
        raise _BadSource(f"dataset {path}: {what}. Known: {supported}")


def _list_folder(folder: Path) -> tuple[Path, ...]:
    """List data files in a folder and its subfolders, sorted. Links to folders are not followed: they may be loops."""
    files = []
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(root, name) for name in sorted(names) if not name.startswith(".") and name not in NOT_DATA]
        files += [path for path in paths if kind_of(path) is not None]
    if not files:
        raise _BadSource(f"dataset {folder}: the folder holds no {', '.join(KINDS)} file")
    return tuple(files)


def _select_split(files: tuple[Path, ...], folder: Path, split: str, source: str) -> tuple[Path, ...]:
    """Select the files of a split by the hub's convention: the file's name begins with it, or a parent folder has it.

    `source`: what the config names, for errors.
    Raises: DataError if no file belongs to the split, or if there are several splits and none is named.
    """
    parts = {file: file.relative_to(folder).parts if file.is_relative_to(folder) else file.parts for file in files}

    def select_files(name: str, is_strict: bool) -> tuple[Path, ...]:
        return tuple(file for file in files if any(_is_split_name(part, name, is_strict) for part in parts[file]))

    if split:
        chosen = select_files(split, True) or select_files(split, False)
        if not chosen:
            raise _BadSource(
                f"dataset {source}: none of its files belongs to split '{split}' by its name: "
                f"{', '.join(file.name for file in files[:6])}. To hold rows out of a file, set eval_fraction"
            )
        return chosen
    splits = [name for name in SPLITS if select_files(name, False)]
    if any(name.startswith("train") for name in splits) and not all(name.startswith("train") for name in splits):
        raise _BadSource(
            f"dataset {source} holds several splits: {', '.join(splits)}. Name one, for example with `split: train`"
        )
    return files


def _is_split_name(part: str, split: str, is_strict: bool) -> bool:
    """Return whether a folder or file name is that of a split: `train.jsonl`, `train-00000-of-00002.parquet`.

    If not strict, the split may be any word of the name: `gsm_train.jsonl`, `train_sft.jsonl`.
    """
    if is_strict:
        return re.match(rf"{re.escape(split)}($|[-.]|_?\d)", part, re.IGNORECASE) is not None
    return re.search(rf"(^|[-._ ]){re.escape(split)}($|[-._ \d])", part, re.IGNORECASE) is not None


def _make_unique_names(files: Sequence[Path]) -> tuple[str, ...]:
    """Return unique names of the files: bare names if those are unique, else with their folder."""
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [str(Path(file.parent.name, file.name)) for file in files]
    return tuple(names)


def _load_from_hub(name: str, subset: str | None, split: str) -> tuple[Path, ...]:
    """Load a hub dataset, or build one from a local repository, with `datasets`; return its Arrow files."""
    try:
        import datasets
    except ImportError as error:
        raise _BadSource(NO_DATASETS.format(name)) from error
    try:
        fetched = datasets.load_dataset(name, subset, split=split)
    except MemoryError:
        raise
    except Exception as error:  # the library passes on any exception of its backends
        raise _BadSource(
            f"dataset {name} (split {split}): no such file or folder here, and it cannot be fetched from the hub: "
            f"{one_line(error)}"
        ) from error
    return tuple(Path(file["filename"]) for file in fetched.cache_files)


def _info_file_of(item: DatasetItem) -> tuple[Path, str] | None:
    """Return the dataset_info.json that an item refers to, and the name of the entry; None for other items."""
    path_text, _, entry = item.path.partition(".json:")
    path = Path(path_text + ".json" if entry else item.path)
    if not (entry or item.name or path.name == "dataset_info.json"):
        return None
    return path / "dataset_info.json" if path.is_dir() else path, item.name or entry


def _find_info_entry(info: Path, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the place of an entry in LLaMA-Factory's dataset_info.json, and its values.

    An empty name is that of the only entry.
    """
    if not info.exists():
        raise _BadSource(f"{info} does not exist, so dataset '{name}' cannot be looked up")
    try:
        entries: Mapping[str, Any] = read_object(info)
    except DamagedFile as error:
        raise _BadSource(f"{error}. It cannot be read as JSON") from error
    if not all(isinstance(entry, dict) for entry in entries.values()):
        raise _BadSource(f"{info} is no dataset_info.json: expected an object with one object per dataset")
    if not name and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        problem = f"has no dataset '{name}'" if name else "names several datasets"
        raise _BadSource(
            f"{info} {problem}. It has: {', '.join(sorted(entries)[:12])}. Ask for one with {info.name}:NAME"
        )
    return f"{info.name}, entry '{name}'", entries[name]


def _resolve_info_entry(at: str, entry: Mapping[str, Any], folder: Path, item: DatasetItem, rows: RowRange) -> Source:
    """Return the source of an entry of the dataset_info.json in `folder`: its file and the roles of its columns."""
    for key in ("script_url", "cloud_file_name"):
        if key in entry:
            raise _BadSource(f"{at} uses {key}, which is not supported; give file_name or hf_hub_url")
    spec = _build_info_spec(entry, at)
    if spec.format == "auto":
        spec = replace(spec, format=item.format)
    samples = entry.get("num_samples")
    if samples is not None and not is_size(samples):
        raise _BadSource(f"{at}: num_samples is {samples!r}; it must be a number")
    if samples is not None and rows == RowRange():
        rows = RowRange(None, str(samples))
    if "file_name" in entry:
        path = folder / str(entry["file_name"])
        if not path.exists():
            raise _BadSource(f"{at}: its file_name {path} does not exist")
        split = SPLIT.match(item.split or str(entry.get("split") or ""))
        files = _find_local_files(str(path), split["name"] if split else "")
        return Source(files, _make_unique_names(files), spec, item.weight, rows)
    if "hf_hub_url" not in entry:
        raise _BadSource(f"{at} has neither file_name nor hf_hub_url; it has {', '.join(sorted(entry)) or 'nothing'}")
    hub = str(entry["hf_hub_url"])
    if entry.get("folder"):
        raise _BadSource(f"{at} names a folder of a hub dataset, which is not supported; fetch it yourself")
    files = _load_from_hub(hub, entry.get("subset"), entry.get("split", "train"))
    return Source(files, tuple(f"{hub}/{file.name}" for file in files), spec, item.weight, rows)


INFO_COLUMNS: dict[str, dict[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
"""Map from LLaMA-Factory's column names to Surefoot's, by `formatting`."""
INFO_TAGS = get_args(MessageTag)
PAIR_COLUMNS = {"chosen": "chosen", "rejected": "rejected"}
UNTRAINABLE_INFO = ("videos", "audios")


def _build_info_spec(entry: Mapping[str, Any], at: str) -> FormatSpec:
    formatting, columns, tags = (entry.get(name) for name in ("formatting", "columns", "tags"))
    formatting = formatting or "alpaca"
    if not isinstance(formatting, str) or formatting not in INFO_COLUMNS:
        known_formats = ", ".join(INFO_COLUMNS)
        raise _BadSource(f"{at}: formatting {shown(formatting)} is not known. Known: {known_formats}")
    others = {name: name for name in ("system", "tools", "images", "kto_tag")}
    columns_by_name = {**INFO_COLUMNS[formatting], **PAIR_COLUMNS, **others}
    for name, value, names in (("columns", columns, (*columns_by_name, *UNTRAINABLE_INFO)), ("tags", tags, INFO_TAGS)):
        if value is not None and not isinstance(value, dict):
            raise _BadSource(f"{at}: {name} is {value!r}; it must be an object")
        for key in value or {}:
            if key not in names:
                raise _BadSource(f"{at}: {name} names '{key}', which is not known. Known: {', '.join(names)}")
    used = {str(name): str(column) for name, column in (columns or {}).items() if column}
    untrainable = sorted(used.keys() & set(UNTRAINABLE_INFO))
    if untrainable:
        raise _BadSource(f"{at} has {', '.join(untrainable)}; this version trains on answers to texts and images")
    tags = {str(tag): str(value) for tag, value in (tags or {}).items()}
    if formatting == "openai":
        tags = {"role_tag": "role", "content_tag": "content", **tags}
    if entry.get("converter") or (entry.get("formatting") is None and not columns and not entry.get("ranking")):
        return FormatSpec(tags=tags)  # LLaMA-Factory v1 entries name no formatting: it is detected from columns
    if formatting == "alpaca" and list(used) == ["prompt"]:  # LLaMA-Factory's form for pre-training
        return FormatSpec("text", {"text": used["prompt"]}, only_mapped=True, named_in=at)
    format = "messages" if formatting == "openai" else formatting
    mapped = {columns_by_name[name]: column for name, column in used.items()}
    if entry.get("ranking") or used.keys() & PAIR_COLUMNS.keys():
        format, mapped = "preference", {**PAIR_COLUMNS, **mapped}
    return FormatSpec(format, mapped, tags, only_mapped=bool(columns), named_in=at)


def _resolve_bound(text: str | None, num_rows: int, otherwise: int) -> int:
    if text is None:
        return otherwise
    value = round(int(text[:-1]) / 100 * num_rows) if text.endswith("%") else int(text)
    return min(max(value + num_rows if value < 0 else value, 0), num_rows)
