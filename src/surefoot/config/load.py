"""Loader that turns YAML and `key=value` into a `RunConfig`, and keeps each setting's place for errors."""

import difflib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from surefoot.config.aliases import ALIASES, FLAG_ALIASES, INSTEAD, NOT_HERE, VALUE_ALIASES
from surefoot.config.deepspeed import CHANGES_TRAINING, read_deepspeed
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.documents import check_value, parse_override, read_entries, read_text, shorten
from surefoot.config.items import (
    Setting,
    describe_item_error,
    expand_dataset_items,
    expand_items,
    find_item_class,
    rephrase_message,
)
from surefoot.config.methods import known_fields, methods_with, settings_class
from surefoot.config.paths import check_template_size
from surefoot.config.schema import REGULAR_EXPRESSION, RunConfig
from surefoot.config.validate import contradictions
from surefoot.errors import ConfigError

NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$")
MOST_DIGITS = 100
"""Largest number of digits of an integer: Python converts at most 4,300, and the largest in a config has 19."""
RIVALS = {
    "max_steps": "num_train_epochs",
    "num_train_epochs": "max_steps",
    "warmup_steps": "warmup_ratio",
    "warmup_ratio": "warmup_steps",
}
"""Pairs of settings that set the same thing; an override of either replaces the other."""
FILE_FIELDS = ("dataset_dir", "output_dir", "chat_template", "init_adapter", "image_dir")
DATASET_FIELDS = ("dataset", "eval_dataset")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and where each setting came from."""

    run: RunConfig
    places: Mapping[str, str]
    """Field name -> `run.yaml:14`, `command line` or `default`."""
    renamed: Mapping[str, str]
    """Names of other trainers that were used -> names of the settings."""
    notes: Sequence[str] = ()
    """Notes for the user about how the config was read."""

    def as_json(self) -> dict[str, Any]:
        """Return the whole config as JSON, for the processes of a run; see `from_json`."""
        run = self.run.model_dump(mode="json")
        return {"run": run, "places": dict(self.places), "renamed": dict(self.renamed), "notes": list(self.notes)}

    @staticmethod
    def from_json(payload: Mapping[str, Any]) -> "LoadedConfig":
        return LoadedConfig(
            settings_class(payload["run"]["method"])(**payload["run"]),
            payload["places"],
            payload["renamed"],
            payload["notes"],
        )

    def where(self, *fields: str) -> str:
        """Return the places of some fields, for an error message."""
        return ", ".join(dict.fromkeys(self.places.get(field, "default") for field in fields))


OF_OTHERS = frozenset(
    "stage do_train finetuning_type template base_model sequence_len rlhf_type train_type tuner_type model_name".split()
)
"""Settings that identify a config of LLaMA-Factory, axolotl or ms-swift."""


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Read a YAML file, then `key=value` overrides, then Python `values`; later ones win.

    Relative paths in the file are relative to the file, others (and those from a pipe) to the current folder.
    Raises: ConfigError for anything that is not a valid, consistent config.
    """
    entries: list[tuple[str, Setting]] = []
    if path is not None:
        if "=" in str(path) and not Path(path).exists():
            shown = shorten(str(path), quote=False)
            raise ConfigError(f"{shown}: no such file. Settings follow a file: run.yaml key=value.")
        read = read_entries(read_text(Path(path)), shorten(Path(path).name, quote=False))
        base = Path(path).resolve().parent if Path(path).is_file() else Path.cwd()  # a pipe has no folder of its own
        entries = [(key, Setting(value, place, base)) for key, value, place in read]
    later = _list_later_entries(overrides, values or {})
    # Only the last DeepSpeed config counts: it replaces the earlier ones entirely.
    last = max((number for number, (key, _) in enumerate(later) if key in DEEPSPEED_KEYS), default=None)
    file = shorten(Path(path).name, quote=False) if path is not None else None
    settings = _Settings(_find_method_class([*entries, *later]), file)
    # The file's own settings come before those of the DeepSpeed config it points to.
    for key, setting in sorted(entries, key=lambda entry: entry[0] in DEEPSPEED_KEYS):
        if key not in DEEPSPEED_KEYS or last is None:
            settings.add(key, setting, replace=False)
    for number, (key, setting) in enumerate(later):
        if key not in DEEPSPEED_KEYS or number == last:
            settings.add(key, setting, replace=True)
    if settings.problems:
        raise ConfigError("\n".join([*_suggest_import(path, [key for key, _ in entries]), *settings.problems]))
    loaded = LoadedConfig(settings.validate(), settings.places, settings.renamed, settings.notes)
    check_contradictions(loaded)
    return loaded


def _suggest_import(path: str | Path | None, keys: Sequence[str]) -> list[str]:
    """Return advice if the keys of a file are those of another program."""
    if path is None or OF_OTHERS.isdisjoint(keys):
        return []
    return [f"This looks like a config of another program: surefoot import --to NEW.yaml {path} converts it."]


def _list_later_entries(overrides: Sequence[str], values: Mapping[str, Any]) -> list[tuple[str, Setting]]:
    """Return (key, setting) of what follows the file, in order. Raises: ConfigError for text that is no `key=value`."""
    later = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            typo = "" if text.isascii() else f" Write {unicodedata.normalize('NFKC', text).replace(':', '=', 1)}."
            raise ConfigError(f"{shorten(text)} is not of the form key=value (command line).{typo}")
        later.append((key.lstrip("-"), Setting(parse_override(value, "command line"), "command line", Path.cwd())))
    for key, value in values.items():
        value = str(value) if isinstance(value, Path) else value
        later.append((key, Setting(value, "argument", Path.cwd())))
    return later


def _find_method_class(entries: Sequence[tuple[str, Setting]]) -> type[RunConfig]:
    """Return the settings class of the method that the last entry names. Raises: ConfigError, see `settings_class`."""
    default = name = str(RunConfig.model_fields["method"].default)
    place = "default"
    for key, setting in entries:
        if ALIASES.get(key, key) == "method":
            check_value(setting.value, key, setting.place)
            name = default if setting.value is None else str(setting.value)
            place = setting.place
    try:
        return settings_class(name)
    except ConfigError as error:
        raise ConfigError(f"{error} ({place}). {RunConfig.model_fields['method'].description}") from error


class _Settings:
    """Settings as they are read, until they become a config."""

    def __init__(self, kind: type[RunConfig], file: str | None) -> None:
        """`file`: name of the config file, if there is one."""
        self._kind = kind
        self._file = file
        self._fields = {**known_fields(), **kind.model_fields}
        self._settings: dict[str, Setting] = {}
        self._leftover: list[str] = []
        """Entries of DeepSpeed configs that have no counterpart."""
        self.renamed: dict[str, str] = {}
        self.problems: list[str] = []
        """Messages about entries that cannot be added."""

    @property
    def places(self) -> dict[str, str]:
        """Place of each setting, see `LoadedConfig`."""
        return {name: setting.place for name, setting in self._settings.items()}

    @property
    def notes(self) -> list[str]:
        """Notes for the user, see `LoadedConfig`."""
        notes = [
            f"{setting.place} is read as {name}={setting.shown}"
            for name, setting in self._settings.items()
            if setting.is_mapped
        ]
        changing = [entry for entry in self._leftover if CHANGES_TRAINING.match(entry)]
        if changing:
            notes.append(f"DeepSpeed settings that would change training, and are NOT applied: {', '.join(changing)}")
        if rest := [entry for entry in self._leftover if entry not in changing]:
            notes.append(f"DeepSpeed settings without a counterpart, ignored: {', '.join(rest)}")
        return notes

    def add(self, key: str, setting: Setting, *, replace: bool) -> None:
        """Add one entry of a file, or with `replace` one that overrides the file; if it is wrong, note the problem."""
        try:
            check_value(setting.value, key, setting.place)
            if key not in DEEPSPEED_KEYS:
                self._add_setting(key, setting, replace=replace)
            elif setting.value is not None:
                self._add_deepspeed(setting, replace=replace)
        except ConfigError as error:
            self.problems.append(str(error))

    def _add_setting(self, key: str, setting: Setting, *, replace: bool) -> None:
        name = ALIASES.get(key, key)
        if key in FLAG_ALIASES and isinstance(setting.value, bool):
            if not setting.value and key not in ("bf16", "fp32"):
                return
            name, value = FLAG_ALIASES[key]
            if not setting.value:
                raise ConfigError(f"{key}=false does not say which type to compute in; set {name} ({setting.place}).")
            setting.value = value
        if name not in self._fields:
            if key in NOT_HERE and setting.value is False:
                return
            raise self._unknown_setting_error(key, setting)
        if name != key:
            self.renamed[key] = name
        earlier = self._settings.get(name)
        if earlier is not None and not replace:
            raise ConfigError(
                f"'{name}' is set twice: to {earlier.shown} ({earlier.place}) and to {setting.shown}"
                f"{f' as {key!r}' if key != name else ''} ({setting.place}). Keep one."
            )
        rival = RIVALS.get(name, "")
        if replace and rival in self._settings and self._settings[rival].place != setting.place:
            self._settings.pop(rival)  # later entries win, also over a rival
        if setting.value is None and not _can_be_none(self._fields[name].annotation):  # back to its default
            self._settings.pop(name, None)
        else:
            self._settings[name] = setting

    def _unknown_setting_error(self, key: str, setting: Setting) -> ConfigError:
        if key in NOT_HERE:
            return ConfigError(f"'{key}': {NOT_HERE[key]} ({setting.place}).")
        if key in INSTEAD:
            return ConfigError(f"unknown setting '{key}' ({setting.place}): {INSTEAD[key]}.")
        if key in OF_OTHERS:
            return ConfigError(f"unknown setting {key!r} ({setting.place}).")
        if methods := methods_with(key):
            return self._other_method_error([key], methods, setting.place)
        return ConfigError(f"unknown setting {shorten(key)}{_suggest_name(key, self._fields)} ({setting.place}).")

    def _add_deepspeed(self, setting: Setting, *, replace: bool) -> None:
        mapped, leftover = read_deepspeed(setting.value, setting.base, setting.place)
        self._leftover += leftover
        for name, value, place in mapped:
            counterpart = Setting(value, place, setting.base, is_mapped=True)
            earlier = self._settings.get(name)
            if earlier is None or self._normalise(name, earlier) != self._normalise(name, counterpart):
                # A file and the JSON it points to conflict: the later one wins, and the notes name the change.
                if earlier is not None and replace:
                    counterpart.place += f" (over {name}={earlier.shown} of {earlier.place})"
                self._add_setting(name, counterpart, replace=replace)

    def validate(self) -> RunConfig:
        """Return the config. Raises: ConfigError with every invalid setting and its place."""
        values = {name: self._normalise(name, setting) for name, setting in self._settings.items()}
        for name in DATASET_FIELDS:
            if name in self._settings:
                values[name] = expand_dataset_items(self._settings[name], name, values.get("dataset_dir"))
        self._drop_other_methods(values)
        try:
            return self._kind(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(self._list_problems(error, values))) from error

    def _drop_other_methods(self, values: dict[str, Any]) -> None:
        """Remove settings of other methods at their default value; run.yaml of older versions contains them.

        Raises: ConfigError if any has another value.
        """
        foreign = [name for name in values if name not in self._kind.model_fields]
        wrong = [name for name in foreign if values[name] != self._fields[name].default]
        if wrong:
            places = ", ".join(dict.fromkeys(self._settings[name].place for name in wrong))
            raise self._other_method_error(sorted(wrong), methods_with(wrong[0]), places)
        for name in foreign:
            del values[name], self._settings[name]

    def _other_method_error(self, names: Sequence[str], methods: Sequence[str], places: str) -> ConfigError:
        own = self._kind.model_fields["method"].default
        fix = f"Set method: {methods[0]}, or drop it" if len(methods) == 1 else "Drop it, or set one of these methods"
        return ConfigError(
            f"{', '.join(names)} is a setting of method {' or '.join(methods)}, and this run has method {own}. {fix} "
            f"({places})."
        )

    def _list_problems(self, error: ValidationError, values: Mapping[str, Any]) -> Iterator[str]:
        refused: set[str] = set()
        for item in error.errors():
            name = str(item["loc"][0])
            about = self._fields[name].description
            if item["type"] == "missing" and len(item["loc"]) == 1:
                yield f"'{name}' is missing{f' in {self._file}' if self._file is not None else ''}. {about}"
                continue
            if name in refused:  # a setting of several types produces one error per type
                continue
            refused.add(name)
            place = self._settings[name].place
            parts = [shorten(part, quote=False) for part in item["loc"][1:]]
            inside = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)
            kind = find_item_class(self._fields[name])
            if kind is not None and inside:
                yield f"{name}{inside}{describe_item_error(item, kind)} ({place})."
                continue
            yield f"{name}={shorten(values[name])}: {rephrase_message(item['msg'])} ({place}). {about}"

    def _normalise(self, name: str, setting: Setting) -> Any:
        """Convert numbers written as text (YAML reads `1e-4` so), values of other trainers, and relative paths."""
        value, field = setting.value, self._fields[name]
        if isinstance(value, str):
            if NUMBER.match(value) and is_number_type(field.annotation):
                value = int(value) if value.isdigit() and len(value) < MOST_DIGITS else float(value)
                check_value(value, name, setting.place)
            value = VALUE_ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value
        if name == "quantization" and type(value) is int:  # the number of bits
            value = VALUE_ALIASES[name].get(str(value), value)
        if name == "report_to":
            value = [] if value in ("none", None) else [value] if isinstance(value, str) else value
        if name == "target_modules" and isinstance(value, str) and not REGULAR_EXPRESSION.search(value):
            names = re.split(r"[,\s]+", value.strip())  # q_proj,v_proj, as LLaMA-Factory has it
            return names if len(names) > 1 else value
        if name in ("modules_to_save", "freeze_modules"):
            value = [] if value is None else value
            return re.split(r"[,\s]+", value.strip(", \n")) if isinstance(value, str) else value
        kind = find_item_class(field)
        if kind is not None and value is not None and name not in DATASET_FIELDS:
            return expand_items(value if isinstance(value, list) else [value], kind, setting, name)
        if name in FILE_FIELDS and isinstance(value, str):
            path = setting.resolve(value, name)
            if name == "chat_template":
                check_template_size(path, setting.place)
            return str(path)
        if name in ("model", "teacher_model") and isinstance(value, str) and not value.startswith("pypi:"):
            beside = setting.resolve(value, name)
            return str(beside) if beside.is_dir() or value.startswith((".", "~", "$")) else value
        if name == "resume_from_checkpoint" and isinstance(value, str) and value not in ("auto", "never"):
            return str(setting.resolve(value, name))
        if name == "resume_from_checkpoint" and value in ("never", True):
            return "auto" if value is True else False
        return value


def _suggest_name(key: str, fields: Mapping[str, FieldInfo]) -> str:
    near = difflib.get_close_matches(key, [*fields, *ALIASES], n=1, cutoff=0.6)
    if not near:
        return ". `surefoot settings` lists them all"
    meant = ALIASES.get(near[0], near[0])
    return f"; did you mean '{meant}'?"


def _can_be_none(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def is_number_type(annotation: Any) -> bool:
    """Return whether a setting of this type may be a number."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return any(is_number_type(part) for part in get_args(annotation))
    return annotation is float or annotation is int


def check_contradictions(loaded: LoadedConfig) -> None:
    """Raise ConfigError with all settings that exclude each other."""
    # A resolved config names every field, so only values other than the default count as set by the user.
    run, fields = loaded.run, type(loaded.run).model_fields
    non_default = {name for name in loaded.places if getattr(run, name) != fields[name].default}
    conflicts = [
        f"{conflict.text} ({loaded.where(*conflict.fields)})." for conflict in contradictions(run, non_default)
    ]
    if len(conflicts) > 1:
        raise ConfigError("\n".join([f"{len(conflicts)} settings conflict:", *(f"- {text}" for text in conflicts)]))
    if conflicts:
        raise ConfigError(conflicts[0])


def as_yaml(run: RunConfig) -> str:
    """Return the resolved config as YAML, as it is written to the run folder."""
    return yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
