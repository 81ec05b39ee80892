"""From YAML and `key=value` to a `RunConfig`, with the place of every setting so that errors can point at it."""

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from surefoot.config.deepspeed import CHANGES_TRAINING, read_deepspeed
from surefoot.config.deepspeed import KEYS as DEEPSPEED_KEYS
from surefoot.config.names import ALIASES, FLAG_ALIASES, NOT_HERE, VALUE_ALIASES
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
FILE_FIELDS = ("dataset_dir", "output_dir", "chat_template", "init_adapter")
DATASET_FIELDS = ("dataset", "eval_dataset")
ITEMS: dict[str, type[BaseModel]] = {**dict.fromkeys(DATASET_FIELDS, DatasetItem), "reward_funcs": RewardItem}
ENDPOINT = re.compile(r"^[^\s:]+:(\d{1,5})$")
VLLM_ADDRESS = re.compile(r"^http://[^\s/:]+:(\d{1,5})/?$")
MOST_PORT = 65535
Refuse = Callable[..., None]
"""(text, *fields): raises ConfigError with the places of the fields."""
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

    def add(key: str, setting: _Setting, *, replace: bool) -> None:
        if key not in DEEPSPEED_KEYS:
            _add(settings, renamed, key, setting, replace=replace)
        elif setting.value is not None:
            leftover.extend(_add_deepspeed(settings, renamed, setting, replace=replace))

    if path is not None:
        base = Path(path).resolve().parent if Path(path).is_file() else Path.cwd()  # a pipe has no folder of its own
        # What the file itself says comes before what it points to.
        for key, value, place in sorted(_read_yaml(Path(path)), key=lambda entry: entry[0] in DEEPSPEED_KEYS):
            add(key, _Setting(value, place, base), replace=False)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"'{text}' is not of the form key=value (command line).")
        add(key.lstrip("-"), _Setting(_parse_value(value), "command line", Path.cwd()), replace=True)
    for key, value in (values or {}).items():
        value = str(value) if isinstance(value, Path) else value
        add(key, _Setting(value, "argument", Path.cwd()), replace=True)
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

    def refuse(text: str, *fields: str) -> None:
        raise ConfigError(f"{text} ({loaded.where(*fields)}).")

    _check_json(loaded.run, refuse)
    _check_grpo(loaded.run, given, refuse)
    _check_ranks(loaded.run, refuse)
    _check_tuning(loaded.run, given, refuse)
    _check_course(loaded.run, given, refuse)


def _check_ranks(run: RunConfig, refuse: Refuse) -> None:
    """What is dealt to ranks, and where they meet."""
    if run.global_batch_size is not None and run.gradient_accumulation_steps is not None:
        ranks = run.nproc_per_node * run.nnodes
        product = run.per_device_train_batch_size * run.gradient_accumulation_steps * ranks
        if product != run.global_batch_size:
            refuse(
                f"global_batch_size={run.global_batch_size} but per_device_train_batch_size="
                f"{run.per_device_train_batch_size} x gradient_accumulation_steps={run.gradient_accumulation_steps} x "
                f"{ranks} ranks = {product}. Both name the sequences of one step; keep global_batch_size "
                "and drop the other",
                "global_batch_size",
                "gradient_accumulation_steps",
            )
    if run.nnodes > 1 and not run.rdzv_endpoint:
        refuse(
            f"nnodes={run.nnodes} without rdzv_endpoint: the machines have no place to meet. Give host:port of the "
            "first one, for example rdzv_endpoint: node0:29500",
            "nnodes",
        )
    if run.rdzv_endpoint is not None:
        port = ENDPOINT.match(run.rdzv_endpoint)
        if port is None or not 0 < int(port[1]) <= MOST_PORT:
            refuse(
                f"rdzv_endpoint={run.rdzv_endpoint} is not host:port with a port from 1 to {MOST_PORT}. An example is "
                "node0:29500; an IPv6 address needs a name",
                "rdzv_endpoint",
            )
    if run.webhook is not None and run.webhook.removeprefix("$") not in os.environ:
        refuse(
            f"webhook={run.webhook}, but the environment has no {run.webhook.removeprefix('$')}. Export it, or leave "
            "webhook out",
            "webhook",
        )


def _check_tuning(run: RunConfig, given: set[str], refuse: Refuse) -> None:
    """What is trained."""
    if run.tuning == "full":
        lora = sorted(
            given & {"lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "init_adapter"}
        )
        if lora:
            refuse(
                f"tuning=full trains every weight, yet {', '.join(lora)} asks for LoRA. Drop them or set tuning: lora",
                *lora,
            )
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    if not targets:
        refuse("target_modules is empty, so LoRA would train nothing. Name a group such as attention", "target_modules")
    if run.lora_dropout and any("experts" in target for target in targets):
        refuse(
            f"lora_dropout={run.lora_dropout} with target_modules={targets}: dropout cannot be applied inside the "
            "grouped expert product, and PEFT refuses it too. Set lora_dropout: 0 or leave experts out",
            "lora_dropout",
            "target_modules",
        )


def _check_grpo(run: RunConfig, given: set[str], refuse: Refuse) -> None:
    """What GRPO needs, and what means nothing without it."""
    own = {name for name in given if (RunConfig.model_fields[name].description or "").startswith("GRPO:")}
    if run.method != "grpo":
        if own:
            refuse(f"{', '.join(sorted(own))} is a setting of GRPO. Set method: grpo, or drop it", *sorted(own))
        return
    if not run.reward_funcs:
        refuse("method=grpo without reward_funcs: nothing says which answers are better. Name some", "method")
    if run.reward_weights is not None and len(run.reward_weights) != len(run.reward_funcs):
        refuse(
            f"reward_weights has {len(run.reward_weights)} numbers for {len(run.reward_funcs)} reward_funcs",
            "reward_weights",
            "reward_funcs",
        )
    if run.global_batch_size is not None and run.global_batch_size % run.num_generations:
        refuse(
            f"global_batch_size={run.global_batch_size} completions a step are no multiple of "
            f"num_generations={run.num_generations}, so that a group would be cut",
            "global_batch_size",
            "num_generations",
        )
    if run.beta and run.tuning == "full":
        refuse(
            f"beta={run.beta} with tuning=full: the divergence is measured from the model without its adapter, and "
            "there is none. Set tuning: lora, or beta: 0",
            "beta",
            "tuning",
        )
    targets = [run.target_modules] if isinstance(run.target_modules, str) else run.target_modules
    if run.beta and "router" in targets:
        refuse(
            f"beta={run.beta} with router in target_modules: routers are trained in full, so the model without its "
            "adapter is not the one that training began with. Leave router out, or set beta: 0",
            "beta",
            "target_modules",
        )
    if run.soft_overlong_length > run.max_completion_length:
        refuse(
            f"soft_overlong_length={run.soft_overlong_length} is more than "
            f"max_completion_length={run.max_completion_length}",
            "soft_overlong_length",
            "max_completion_length",
        )
    if run.rollout_engine == "vllm":
        _check_vllm(run, given, refuse)
    if "" in run.stops:
        refuse("stop holds an empty text, which ends every completion at once", "stop")
    if run.truncation == "right":
        refuse(
            "truncation=right would cut off the end of a prompt, where the model's turn begins. Set left or drop",
            "truncation",
        )
    unfit = {
        "packing": run.packing,
        "train_on": run.train_on != "assistant",
        "eval_dataset": run.eval_dataset is not None,
        "eval_fraction": run.eval_fraction > 0,
        "router_aux_loss_coef": run.router_aux_loss_coef > 0,
        "compile": run.compile,
        "expert_parallel_size": run.expert_parallel_size == "auto",
    }
    for name in (name for name, is_asked in unfit.items() if is_asked):
        refuse(f"{name}={getattr(run, name)} is not available with method: grpo. Drop it", name)


def _check_vllm(run: RunConfig, given: set[str], refuse: Refuse) -> None:
    if run.tuning == "full":
        refuse(
            "rollout_engine=vllm with tuning=full: only adapters are sent to a server. Set tuning: lora, or "
            "rollout_engine: local",
            "rollout_engine",
            "tuning",
        )
    if run.top_p < 1 or run.top_k:
        refuse(
            "rollout_engine=vllm with top_p or top_k: the server's logprobs are then those of what is left after "
            "cutting, which training cannot compare with its own. Drop them, or set rollout_engine: local",
            "rollout_engine",
            "top_p",
            "top_k",
        )
    address = VLLM_ADDRESS.match(run.vllm_server or "http://127.0.0.1:1")
    if address is None or int(address[1]) > MOST_PORT:
        refuse(f"vllm_server={run.vllm_server} is no address of the form http://127.0.0.1:8000", "vllm_server")
    if "router" in ([run.target_modules] if isinstance(run.target_modules, str) else run.target_modules):
        refuse(
            "rollout_engine=vllm with router in target_modules: routers are trained in full, and only adapters are "
            "sent to a server. Leave router out, or set rollout_engine: local",
            "rollout_engine",
            "target_modules",
        )
    started = given & {"vllm_command", "vllm_args", "vllm_devices"}
    if run.vllm_server is not None and started:
        refuse(
            f"vllm_server is there already, so {', '.join(sorted(started))} would start nothing. Drop one of them",
            "vllm_server",
            *sorted(started),
        )


def _check_json(run: RunConfig, refuse: Refuse) -> None:
    """All ranks get the config as JSON, and the run folder as YAML: what neither can hold would not be the same."""
    values: dict[str, Any] = {
        "chat_template_kwargs": run.chat_template_kwargs,
        "reward_funcs": [item.args for item in run.reward_funcs],
    }
    for name, value in values.items():
        try:
            is_same = json.loads(json.dumps(value)) == value
        except TypeError:
            is_same = False
        if not is_same:
            refuse(
                f"{name}={value} holds values that are no JSON, or keys that are no text. Quote them: YAML reads "
                "2024-01-01 as a date",
                name,
            )


def _check_course(run: RunConfig, given: set[str], refuse: Refuse) -> None:
    """How long the run is, what it evaluates and goes on from."""
    if run.compile and run.gradient_checkpointing:
        refuse(
            "compile and gradient_checkpointing exclude each other: routing of the first forward cannot be carried "
            "into a compiled recomputation. Keep one",
            "compile",
            "gradient_checkpointing",
        )
    if run.warmup_steps is not None and run.warmup_ratio:
        refuse("warmup_steps and warmup_ratio both set the warm-up. Keep one", "warmup_steps", "warmup_ratio")
    if run.max_steps is not None and run.num_train_epochs is not None:
        refuse(
            "max_steps and num_train_epochs both set the length of the run. Keep one", "max_steps", "num_train_epochs"
        )
    if run.eval_steps is not None and run.eval_dataset is None and not run.eval_fraction:
        refuse(
            f"eval_steps={run.eval_steps} without eval_dataset or eval_fraction: there is nothing to evaluate",
            "eval_steps",
        )
    if run.eval_dataset is not None and run.eval_fraction:
        refuse("eval_dataset and eval_fraction both set the held-out data. Keep one", "eval_dataset", "eval_fraction")
    if run.enable_thinking is not None and "enable_thinking" in run.chat_template_kwargs:
        refuse(
            "enable_thinking is set twice, also in chat_template_kwargs. Keep one",
            "enable_thinking",
            "chat_template_kwargs",
        )
    if run.overwrite_output_dir and isinstance(run.resume_from_checkpoint, str) and "resume_from_checkpoint" in given:
        refuse(
            "overwrite_output_dir deletes the run that resume_from_checkpoint would go on from. Keep one",
            "overwrite_output_dir",
            "resume_from_checkpoint",
        )


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
    changes = [
        f"{name}: {saved.get(name)} -> {current[name]}"
        for name in current
        if name not in free and saved.get(name) != current[name]
    ]
    product = saved.get("per_device_train_batch_size", 1) * (saved.get("gradient_accumulation_steps") or 1)
    before = saved.get("global_batch_size") or product
    if before != run.sequences_per_step:
        changes.append(
            f"sequences per step: {before} -> {run.sequences_per_step} (set global_batch_size: {before} to go on)"
        )
    return changes
