"""From YAML and `key=value` to a `RunConfig`, with the place of every setting so that errors can point at it."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from surefoot.config.contradictions import contradictions
from surefoot.config.deepspeed import CHANGES_TRAINING, read_deepspeed
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.names import ALIASES, FLAG_ALIASES, INSTEAD, NOT_HERE, VALUE_ALIASES
from surefoot.config.schema import FREE_ON_RESUME, DatasetItem, RewardItem, RunConfig
from surefoot.errors import ConfigError

NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$")
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
        if key not in DEEPSPEED_KEYS:
            _add(settings, renamed, key, setting, replace=replace)
        elif setting.value is not None:
            leftover.extend(_add_deepspeed(settings, renamed, setting, replace=replace))

    if path is not None:
        entries = _read_yaml(Path(path))
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
        f"{setting.place} is read as {name}={setting.value}" for name, setting in settings.items() if setting.is_mapped
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
            raise ConfigError(f"'{text}' is not of the form key=value (command line).")
        later.append((key.lstrip("-"), _Setting(_parse_value(value), "command line", Path.cwd())))
    for key, value in values.items():
        value = str(value) if isinstance(value, Path) else value
        later.append((key, _Setting(value, "argument", Path.cwd())))
    return later


def _read_yaml(path: Path) -> list[tuple[str, Any, str]]:
    """(key, value, place) of each entry of a flat YAML mapping."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder. Give the YAML file of a run.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}.") from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            raise ConfigError(f"{path} is empty. It needs at least model, dataset and output_dir.")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{path}:1: expected `key: value` lines, found a {type(node).__name__.removesuffix('Node').lower()}."
            )
        loader = yaml.SafeLoader("")
        entries = []
        for key_node, value_node in node.value:
            place = f"{path.name}:{key_node.start_mark.line + 1}"
            entries.append((str(key_node.value), loader.construct_object(value_node, deep=True), place))
        return entries
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path.name}{line}: not valid YAML: {getattr(error, 'problem', error)}.") from error


def _parse_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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
                f"unknown setting '{key}' ({setting.place}). It is one of another program: surefoot import --to "
                f"NEW.yaml {file}"
            )
        if key in INSTEAD:
            raise ConfigError(f"unknown setting '{key}' ({setting.place}): {INSTEAD[key]}.")
        raise ConfigError(f"unknown setting '{key}'{_suggestion(key)} ({setting.place}).")
    if name != key:
        renamed[key] = name
    earlier = settings.get(name)
    if earlier is not None and not replace:
        raise ConfigError(
            f"'{name}' is set twice: to {earlier.value} ({earlier.place}) and to {setting.value}"
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
                theirs.place += f" (over {name}={earlier.value} of {earlier.place})"
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
            values[name] = _dataset_items(settings[name], values.get("dataset_dir"))
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
            inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"][1:])
            if name in ITEMS and inside:
                problems.append(f"{name}{inside}{_about_item(item, ITEMS[name])} ({place}).")
                continue
            about = RunConfig.model_fields[name].description
            problems.append(f"{name}={values[name]!r}: {_explain(item['msg'])} ({place}). {about}")
        raise ConfigError("\n".join(problems)) from error


def _about_item(item: Any, kind: type[BaseModel]) -> str:
    """What is wrong with a part of a setting that is a list of items."""
    key = str(item["loc"][-1])
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
        return f" must be a text or {{{', '.join(fields)}}}, found {item['input']!r}"
    return f": {_explain(item['msg'])}, found {item['input']!r}"


def _explain(message: str) -> str:
    return message.replace("Input should be", "must be")


def _normalise(name: str, setting: _Setting) -> Any:
    """Numbers written as text (YAML reads `1e-4` so), peers' values, and relative paths."""
    value = setting.value
    if isinstance(value, str):
        if NUMBER.match(value) and _takes_number(RunConfig.model_fields[name].annotation):
            value = int(value) if value.isdigit() else float(value)
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
        return str(_absolute(value, setting.base))
    if name == "model" and isinstance(value, str) and not value.startswith("pypi:"):
        beside = _absolute(value, setting.base)
        return str(beside) if beside.is_dir() or value.startswith((".", "~")) else value
    if name == "resume_from_checkpoint" and isinstance(value, str) and value not in ("auto", "never"):
        return str(_absolute(value, setting.base))
    if name == "resume_from_checkpoint" and value in ("never", True):
        return "auto" if value is True else False
    return value


def _dataset_items(setting: _Setting, dataset_dir: Any) -> Any:
    """A dataset setting in any of its forms as a list of items with absolute paths."""
    value = setting.value
    if isinstance(value, str) and isinstance(dataset_dir, str):
        value = [name.strip() for name in value.split(",")]
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
                item["path"] = _dataset_path(item["path"], setting.base)
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
                item["func"] = f"{_absolute(file, setting.base)}:{function}"
        items.append(item)
    return items


def _dataset_path(path: str, base: Path) -> str:
    """Absolute, but for what can only be a hub id."""
    local = _absolute(path, base)
    may_be_hub = HUB_ID.match(path) and not local.exists() and "." not in Path(path).name and not path.startswith(".")
    return path if may_be_hub else str(local)


def _absolute(value: str, base: Path) -> Path:
    return Path(base, Path(value).expanduser()).resolve()


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


def changed_fields(saved: Mapping[str, Any], run: RunConfig, *, also: Sequence[str] = ()) -> list[str]:
    """The settings that enter a run's numbers and differ from another config's: `learning_rate: 0.0001 -> 0.0002`.

    `also`: settings to compare that do not enter them.
    """
    current = run.model_dump(mode="json")
    free = FREE_ON_RESUME - set(also)
    has_fixed_warmup = run.warmup_steps is not None or run.warmup_ratio == 0
    if run.lr_scheduler_type == "constant" and has_fixed_warmup:  # then the length of the run enters only its end
        free |= {"max_steps", "num_train_epochs"} - set(also)
    # A version that did not have a setting did what its default says.
    before = {name: saved.get(name, field.default) for name, field in RunConfig.model_fields.items()}
    compared = [name for name in current if name not in free]
    changes = [change for name in compared for change in _differences(name, before[name], current[name])]
    product = saved.get("per_device_train_batch_size", 1) * (saved.get("gradient_accumulation_steps") or 1)
    each = saved.get("global_batch_size") or product
    if each != run.sequences_per_step:
        changes.append(
            f"sequences per step: {each} -> {run.sequences_per_step} (set global_batch_size: {each} to go on)"
        )
    return changes


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    """Where two values of a setting differ, down to a single one: `dataset[0].path: a.jsonl -> b.jsonl`."""
    if before == now:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(f"{name}[{place}]", one, other)
    else:
        yield f"{name}: {before} -> {now}"
