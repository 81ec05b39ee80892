"""From YAML and `key=value` to a `RunConfig`, with the place of every setting so that errors can point at it."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from surefoot.config.aliases import ALIASES, FLAG_ALIASES, INSTEAD, NOT_HERE, VALUE_ALIASES
from surefoot.config.deepspeed import CHANGES_TRAINING, read_deepspeed
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.documents import check_value, parse_override, read_entries, read_text, shorten
from surefoot.config.paths import check_template_size, resolve_path
from surefoot.config.schema import DatasetItem, RewardItem, RunConfig
from surefoot.config.validate import contradictions
from surefoot.errors import ConfigError

NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$")
MOST_DIGITS = 100
"""Python turns no longer text into an integer than 4,300 digits; the largest integer of a config has 19."""
RIVALS = {
    "max_steps": "num_train_epochs",
    "num_train_epochs": "max_steps",
    "warmup_steps": "warmup_ratio",
    "warmup_ratio": "warmup_steps",
}
"""Two ways to set one thing; an override of one takes the place of the other."""
FILE_FIELDS = ("dataset_dir", "output_dir", "chat_template", "init_adapter", "image_dir")
DATASET_FIELDS = ("dataset", "eval_dataset")
ITEMS: dict[str, type[BaseModel]] = {**dict.fromkeys(DATASET_FIELDS, DatasetItem), "reward_funcs": RewardItem}
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and where each setting came from."""

    run: RunConfig
    places: Mapping[str, str]
    """Field name -> `run.yaml:14`, `command line` or `default`."""
    renamed: Mapping[str, str]
    """Peers' names that were used -> ours."""
    notes: Sequence[str] = ()
    """What else the user should know about how the config was read."""

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON, for the processes of a run; see `from_json`."""
        run = self.run.model_dump(mode="json")
        return {"run": run, "places": dict(self.places), "renamed": dict(self.renamed), "notes": list(self.notes)}

    @staticmethod
    def from_json(said: Mapping[str, Any]) -> "LoadedConfig":
        return LoadedConfig(RunConfig(**said["run"]), said["places"], said["renamed"], said["notes"])

    def where(self, *fields: str) -> str:
        """The places of some fields, for an error message."""
        return ", ".join(dict.fromkeys(self.places.get(field, "default") for field in fields))


@dataclass
class _Setting:
    value: Any
    place: str
    base: Path
    """Relative paths in the value are relative to this folder."""
    is_mapped: bool = False
    """Read from a config of another program."""

    def resolve(self, path: str, name: str) -> Path:
        """Return a path in the value as an absolute one. Raises: ConfigError, see `resolve_path`."""
        return resolve_path(path, self.base, name, self.place)

    @property
    def shown(self) -> str:
        """The value as messages show it."""
        return shorten(self.value, quote=False)


OF_OTHERS = frozenset({"stage", "do_train", "base_model", "rlhf_type", "train_type", "tuner_type", "model_name"})
"""Settings by which a config is known for one of LLaMA-Factory, axolotl or ms-swift."""


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Read a YAML file, then `key=value` overrides, then Python `values`; later ones win.

    Relative paths in the file are relative to the file, others (and those from a pipe) to the current folder.
    Raises: ConfigError for anything that is not a valid, consistent config.
    """
    settings: dict[str, _Setting] = {}
    renamed: dict[str, str] = {}
    leftover: list[str] = []
    later = _later(overrides, values or {})
    # One DeepSpeed config takes the place of another, of which nothing holds then.
    last = max((number for number, (key, _) in enumerate(later) if key in DEEPSPEED_KEYS), default=None)

    def add(key: str, setting: _Setting, *, replace: bool) -> None:
        check_value(setting.value, key, setting.place)
        if key not in DEEPSPEED_KEYS:
            _add(settings, renamed, key, setting, replace=replace)
        elif setting.value is not None:
            leftover.extend(_add_deepspeed(settings, renamed, setting, replace=replace))

    if path is not None:
        entries = read_entries(read_text(Path(path)), shorten(Path(path).name, quote=False))
        base = Path(path).resolve().parent if Path(path).is_file() else Path.cwd()  # a pipe has no folder of its own
        # What the file itself says comes before what it points to.
        for key, value, place in sorted(entries, key=lambda entry: entry[0] in DEEPSPEED_KEYS):
            if key not in DEEPSPEED_KEYS or last is None:
                add(key, _Setting(value, place, base), replace=False)
    for number, (key, setting) in enumerate(later):
        if key not in DEEPSPEED_KEYS or number == last:
            add(key, setting, replace=True)
    places = {name: setting.place for name, setting in settings.items()}
    run = _validate(settings)
    notes = [
        f"{setting.place} is read as {name}={setting.shown}" for name, setting in settings.items() if setting.is_mapped
    ]
    changing = [entry for entry in leftover if CHANGES_TRAINING.match(entry)]
    if changing:
        notes.append(f"DeepSpeed's that would train differently, and is NOT done here: {', '.join(changing)}")
    if set(leftover) - set(changing):
        rest = [entry for entry in leftover if entry not in changing]
        notes.append(f"DeepSpeed's without counterpart here, and left out: {', '.join(rest)}")
    loaded = LoadedConfig(run, places, renamed, notes)
    _check_contradictions(loaded)
    return loaded


def _later(overrides: Sequence[str], values: Mapping[str, Any]) -> list[tuple[str, _Setting]]:
    """(key, setting) of what comes after the file, in its order. Raises: ConfigError for what is no `key=value`."""
    later = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{shorten(text)} is not of the form key=value (command line).")
        later.append((key.lstrip("-"), _Setting(parse_override(value, "command line"), "command line", Path.cwd())))
    for key, value in values.items():
        value = str(value) if isinstance(value, Path) else value
        later.append((key, _Setting(value, "argument", Path.cwd())))
    return later


def _add(settings: dict[str, _Setting], renamed: dict[str, str], key: str, setting: _Setting, *, replace: bool) -> None:
    name = ALIASES.get(key, key)
    if key in FLAG_ALIASES and isinstance(setting.value, bool):
        if not setting.value and key not in ("bf16", "fp32"):
            return
        name, value = FLAG_ALIASES[key]
        if not setting.value:
            raise ConfigError(f"{key}=false does not say which type to compute in; set {name} ({setting.place}).")
        setting.value = value
    if name not in RunConfig.model_fields:
        if key in NOT_HERE and setting.value is False:
            return
        if key in NOT_HERE:
            raise ConfigError(f"'{key}': {NOT_HERE[key]} ({setting.place}).")
        if key in OF_OTHERS:
            file = setting.place.partition(":")[0] if ":" in setting.place else "FILE"
            raise ConfigError(
                f"unknown setting {key!r} ({setting.place}). It is one of another program: surefoot import --to "
                f"NEW.yaml {file}"
            )
        if key in INSTEAD:
            raise ConfigError(f"unknown setting '{key}' ({setting.place}): {INSTEAD[key]}.")
        raise ConfigError(f"unknown setting {shorten(key)}{_suggestion(key)} ({setting.place}).")
    if name != key:
        renamed[key] = name
    earlier = settings.get(name)
    if earlier is not None and not replace:
        raise ConfigError(
            f"'{name}' is set twice: to {earlier.shown} ({earlier.place}) and to {setting.shown}"
            f"{f' as {key!r}' if key != name else ''} ({setting.place}). Keep one."
        )
    rival = RIVALS.get(name, "")
    if replace and rival in settings and settings[rival].place != setting.place:  # later ones win, also over a rival
        settings.pop(rival)
    if setting.value is None and not _takes_none(RunConfig.model_fields[name].annotation):  # back to its default
        settings.pop(name, None)
    else:
        settings[name] = setting


def _add_deepspeed(
    settings: dict[str, _Setting], renamed: dict[str, str], setting: _Setting, *, replace: bool
) -> list[str]:
    """Add what a DeepSpeed config says; returns what has no counterpart."""
    mapped, leftover = read_deepspeed(setting.value, setting.base, setting.place)
    for name, value, place in mapped:
        theirs = _Setting(value, place, setting.base, is_mapped=True)
        earlier = settings.get(name)
        if earlier is None or _normalise(name, earlier) != _normalise(name, theirs):
            # A file and the JSON it points to contradict each other; a later place wins, and the notes say over what.
            if earlier is not None and replace:
                theirs.place += f" (over {name}={earlier.shown} of {earlier.place})"
            _add(settings, renamed, name, theirs, replace=replace)
    return leftover


def _suggestion(key: str) -> str:
    known = [*RunConfig.model_fields, *ALIASES]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        return ". `surefoot settings` lists them all"
    meant = ALIASES.get(near[0], near[0])
    return f"; did you mean '{meant}'?" if meant == near[0] else f"; did you mean '{near[0]}' (here: {meant})?"


def _validate(settings: dict[str, _Setting]) -> RunConfig:
    values = {name: _normalise(name, setting) for name, setting in settings.items()}
    for name in DATASET_FIELDS:
        if name in settings:
            values[name] = _dataset_items(name, settings[name], values.get("dataset_dir"))
    try:
        return RunConfig(**values)
    except ValidationError as error:
        problems: list[str] = []
        refused: set[str] = set()
        for item in error.errors():
            name = str(item["loc"][0])
            if item["type"] == "missing" and len(item["loc"]) == 1:
                about = RunConfig.model_fields[name].description
                problems.append(f"'{name}' is missing. {about}")
                continue
            if name in refused:  # a setting of several types is refused once a type
                continue
            refused.add(name)
            place = settings[name].place
            parts = [shorten(part, quote=False) for part in item["loc"][1:]]
            inside = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)
            if name in ITEMS and inside:
                problems.append(f"{name}{inside}{_about_item(item, ITEMS[name])} ({place}).")
                continue
            about = RunConfig.model_fields[name].description
            problems.append(f"{name}={shorten(values[name])}: {_explain(item['msg'])} ({place}). {about}")
        raise ConfigError("\n".join(problems)) from error


def _about_item(item: Any, kind: type[BaseModel]) -> str:
    """What is wrong with a part of a setting that is a list of items."""
    key = shorten(str(item["loc"][-1]), quote=False)
    fields = kind.model_fields
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, list(fields), n=1, cutoff=0.5)
        known = f"; did you mean '{near[0]}'?" if near else f". Known: {', '.join(fields)}"
        return f": there is no such key{known}"
    if item["type"] == "missing":
        return f" is missing. {fields[key].description}"
    if item["type"] == "string_too_short":
        return f" is empty. {fields[key].description}"
    if item["type"] == "model_type":
        return f" must be a text or {{{', '.join(fields)}}}, found {shorten(item['input'])}"
    return f": {_explain(item['msg'])}, found {shorten(item['input'])}"


def _explain(message: str) -> str:
    return message.replace("Input should be", "must be")


def _normalise(name: str, setting: _Setting) -> Any:
    """Numbers written as text (YAML reads `1e-4` so), peers' values, and relative paths."""
    value = setting.value
    if isinstance(value, str):
        if NUMBER.match(value) and _takes_number(RunConfig.model_fields[name].annotation):
            value = int(value) if value.isdigit() and len(value) < MOST_DIGITS else float(value)
        value = VALUE_ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value
    if name == "report_to":
        value = [] if value in ("none", None) else [value] if isinstance(value, str) else value
    if name == "target_modules" and isinstance(value, str) and len(names := re.split(r"[,\s]+", value.strip())) > 1:
        return names  # q_proj,v_proj, as LLaMA-Factory has it
    if name == "reward_funcs":
        return _reward_items(setting)
    if name == "reward_weights" and isinstance(value, list):
        return [float(weight) if isinstance(weight, int) else weight for weight in value]
    if name == "scale_rewards" and isinstance(value, bool):
        return "group" if value else "none"
    if name in FILE_FIELDS and isinstance(value, str):
        path = setting.resolve(value, name)
        if name == "chat_template":
            check_template_size(path, setting.place)
        return str(path)
    if name == "model" and isinstance(value, str) and not value.startswith("pypi:"):
        beside = setting.resolve(value, name)
        return str(beside) if beside.is_dir() or value.startswith((".", "~")) else value
    if name == "resume_from_checkpoint" and isinstance(value, str) and value not in ("auto", "never"):
        return str(setting.resolve(value, name))
    if name == "resume_from_checkpoint" and value in ("never", True):
        return "auto" if value is True else False
    return value


def _dataset_items(name: str, setting: _Setting, dataset_dir: Any) -> Any:
    """A dataset setting in any of its forms as a list of items with absolute paths."""
    value = setting.value
    if isinstance(value, str) and isinstance(dataset_dir, str):
        value = [entry.strip() for entry in value.split(",")]
    items = value if isinstance(value, list) else [value]
    full: list[Any] = []
    for item in items:
        if isinstance(item, str) and isinstance(dataset_dir, str):
            item = {"path": str(Path(dataset_dir, "dataset_info.json")), "name": item}
        elif isinstance(item, str):
            item = {"path": item}
        if isinstance(item, dict):
            item = {
                key: float(part) if key == "weight" and isinstance(part, int) else part for key, part in item.items()
            }
            if isinstance(item.get("path"), str) and item["path"]:
                item["path"] = _dataset_path(item["path"], name, setting)
        full.append(item)
    return None if value is None else full


def _reward_items(setting: _Setting) -> Any:
    """Reward functions in any of their forms as items; files of functions get absolute paths."""
    value = setting.value
    items = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            item = {"func": item}
        if isinstance(item, dict):
            item = {
                key: float(part) if key == "weight" and isinstance(part, int) else part for key, part in item.items()
            }
            file, colon, function = str(item.get("func", "")).rpartition(":")
            if colon and file.endswith(".py"):
                item["func"] = f"{setting.resolve(file, 'reward_funcs')}:{function}"
        items.append(item)
    return items


def _dataset_path(path: str, name: str, setting: _Setting) -> str:
    """Return the absolute path of a source, but a hub id as it stands."""
    local = setting.resolve(path, name)
    may_be_hub = HUB_ID.match(path) and not local.exists() and "." not in Path(path).name and not path.startswith(".")
    return path if may_be_hub else str(local)


def _takes_none(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def _takes_number(annotation: Any) -> bool:
    if get_origin(annotation) is UnionType:
        return any(_takes_number(part) for part in get_args(annotation))
    return annotation is float or annotation is int


def _check_contradictions(loaded: LoadedConfig) -> None:
    """Refuse settings that exclude each other, before anything is read or loaded."""
    # A resolved config names every field, so only values other than the default count as asked for.
    given = {name for name in loaded.places if getattr(loaded.run, name) != RunConfig.model_fields[name].default}
    found = [f"{one.text} ({loaded.where(*one.fields)})." for one in contradictions(loaded.run, given)]
    if len(found) > 1:
        raise ConfigError("\n".join([f"{len(found)} things in this config cannot be:", *(f"- {one}" for one in found)]))
    if found:
        raise ConfigError(found[0])


def as_yaml(run: RunConfig) -> str:
    """The resolved config as it is written to the run folder."""
    return yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
