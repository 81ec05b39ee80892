"""Files of PEFT's adapters: their config and their tensors as stored, and the modules that a config means.

Independent of what their tensors change in a model.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.config.documents import shorten
from surefoot.errors import ModelError
from surefoot.models.lora import LoraSettings
from surefoot.models.peft_layout import PeftLayout
from surefoot.models.resolve_model import read_json_object

PREFIX = "base_model.model."
WRAPPED = ".base_layer."
"""Part of the keys of layers that PEFT stores with their pairs, such as output layers, and of nested pairs."""
OF_EMBEDDINGS = ".lora_embedding_"
"""Part of the keys of low-rank pairs of embeddings."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
SCORES = "SEQ_CLS"
"""PEFT's task type of an adapter that makes a reward model of its base."""
MOST_RANK, MOST_ALPHA = 1_000_000, 1e9
FIRST_LAYER = re.compile(r".*?\.[^.]*\.(\d{1,9})\.", re.ASCII)
LAYERS = r".*\.{}\.(\d{{1,9}})\."
"""How a name of `layers_pattern` is compared with that of a module. Source: check_target_module_exists in peft."""
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of PEFT's init_lora_weights under which the base stays unchanged. PiSSA, OLoRA and similar change it when the
adapter is created, so that the adapter belongs to weights that are saved nowhere."""
OTHER_KINDS = (
    "lora_bias", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
    "trainable_token_indices", "megatron_config",
)  # fmt: skip
"""PEFT settings that combine a pair of matrices in another way than plain LoRA, or choose other modules."""
PATTERN = r"(.*\.)?({})$"
"""How a pattern is compared with a name. Source: get_pattern_key in peft.utils.other."""
RANK_NEEDED, ALPHA_NEEDED = "a whole number above 0", "a number"
PATTERNS = ("rank_pattern", "alpha_pattern")
"""PEFT settings that give some modules a rank or an alpha of their own. PEFT sets them itself for stacks of experts."""
SELECTIONS = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""PEFT settings that leave out modules that `target_modules` names."""


def load_adapter_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a plain LoRA adapter in PEFT's format, as stored.

    Raises: ModelError for a missing adapter, an adapter of another kind, and settings of wrong types.
    """
    path, weights = folder / CONFIG, folder / WEIGHTS
    needs = f"{folder} is no PEFT adapter: it needs a readable {CONFIG} and {WEIGHTS}"
    if (folder / "run.yaml").is_file() and (folder / "adapter").is_dir():
        raise ModelError(f"{folder} is the folder of a run: its adapter is {folder / 'adapter'}.")
    try:
        config = read_json_object(path)
    except ModelError as error:
        raise ModelError(f"{needs} ({error})") from error
    _check_kind(config, path)
    _check_types(config, path)
    if weights.exists() and not weights.is_file():  # opening a pipe would wait for its other end
        raise ModelError(f"{needs} ({weights} is not a file).")
    try:
        return config, load_file(weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{needs} ({weights}: {error}).") from error


def find_base(adapter: Path) -> str:
    """Return the name of the model that an adapter belongs to. Raises: ModelError if it names none."""
    base = load_adapter_files(adapter)[0].get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(f"{adapter}/{CONFIG} names no base model.")
    return base


def gives_scores(folder: Path) -> bool:
    """Return whether an adapter makes a reward model of its base. Raises: ModelError."""
    return read_json_object(folder / CONFIG).get("task_type") == SCORES


def load_for_model(folder: Path, layout: PeftLayout) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of an adapter, by the keys that they would have without PEFT's renaming."""
    config, stored = load_adapter_files(folder)
    if key := next((key for key in stored if OF_EMBEDDINGS in key), None):
        raise ModelError(
            f"{folder}: {key} is a low-rank pair of embeddings, which cannot be read. PEFT's merge_and_unload writes "
            "the adapter as a model."
        )
    return config, {layout.read_key(key.removeprefix(PREFIX)): value for key, value in stored.items()}


def join_shared(stored: dict[str, Tensor], model: PreTrainedModel) -> set[str]:
    """Leave one of two equal tensors of a weight that a model has in two places; return the names of what is left.

    `stored`: tensors of an adapter, by name; changed in place.
    """
    ties: dict[str, str] = model.all_tied_weights_keys
    shared = {name for name in stored.keys() & ties.keys() if ties[name] in stored}
    shared = {name for name in shared if torch.equal(stored[name], stored[ties[name]])}
    for name in shared:
        del stored[name]
    return {ties[name] for name in shared}


def _check_types(config: Mapping[str, Any], path: Path) -> None:
    for name in ("target_modules", "target_parameters", "modules_to_save", "exclude_modules"):
        named = config.get(name)
        if name in ("target_modules", "exclude_modules") and isinstance(named, str):
            _check_pattern(named, named, f"{path}: {name}")
        elif named is not None and not (isinstance(named, list) and all(isinstance(item, str) for item in named)):
            raise ModelError(f"{path}: {name}={shorten(named)}; a list of names is needed.")
    for name, is_valid, needed in zip(PATTERNS, (_is_rank, _is_alpha), (RANK_NEEDED, ALPHA_NEEDED), strict=True):
        values = config.get(name) or {}
        if not isinstance(values, dict) or not all(map(is_valid, values.values())):
            raise ModelError(f"{path}: {name}={shorten(values)}; for each pattern {needed} is needed.")
        for pattern in values:
            _check_pattern(pattern, PATTERN.format(pattern), f"{path}: {name}")
    lists = _as_list(config.get("layers_pattern") or [])
    if not all(isinstance(name, str) for name in lists):
        raise ModelError(f"{path}: layers_pattern={shorten(lists)}; a name or a list of names is needed.")
    for name in lists:
        _check_pattern(name, LAYERS.format(name), f"{path}: layers_pattern")
    layers = config.get("layers_to_transform")
    if layers is not None and any(type(layer) is not int for layer in _as_list(layers)):
        raise ModelError(
            f"{path}: layers_to_transform={shorten(layers)}; a layer's number or a list of them is needed."
        )
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)
    if not _is_rank(rank):
        raise ModelError(f"{path}: r={shorten(rank)}; {RANK_NEEDED} is needed.")
    if not _is_alpha(alpha):
        raise ModelError(f"{path}: lora_alpha={shorten(alpha)}; {ALPHA_NEEDED} is needed.")
    if not isinstance(rslora, bool):
        raise ModelError(f"{path}: use_rslora={shorten(rslora)}; true or false is needed.")


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_RANK


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST_ALPHA  # type: ignore[arg-type]


def _check_pattern(pattern: str, as_used: str, place: str) -> None:
    try:
        re.compile(as_used)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{place}: {shorten(pattern)} is no regular expression: {error}.") from error


def is_named(module: str, names: str | Iterable[str] | None) -> bool:
    """Return whether names, or a regular expression of full names, mean a module."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names or ())


def is_selected(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT adapts a linear module. Source: check_target_module_exists in peft.tuners.tuners_utils."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    if not is_named(module, targets) or is_named(module, config.get("exclude_modules")):
        return False
    if layers in (None, []) or isinstance(targets, str) or module in targets:
        return True
    patterns = config.get("layers_pattern") or []
    lists = [re.compile(LAYERS.format(name), re.ASCII) for name in _as_list(patterns)] or [FIRST_LAYER]
    number = next((match for pattern in lists if (match := pattern.match(module))), None)
    return number is not None and int(number[1]) in _as_list(layers)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def describe_targets(config: Mapping[str, Any]) -> str:
    names = ("target_modules", "target_parameters", "modules_to_save", *SELECTIONS)
    return ", ".join(f"{name}={config[name]!r}" for name in names if config.get(name)) or "no targets"


def read_strength(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank and the scaling of a module or a parameter."""

    def find(setting: str, default: Any) -> Any:
        patterns = (config.get(setting) or {}).items()
        return next((value for key, value in patterns if re.match(PATTERN.format(key), name)), default)

    rank, alpha = find("rank_pattern", config["r"]), find("alpha_pattern", config["lora_alpha"])
    return rank, LoraSettings(rank, alpha, rslora=config.get("use_rslora", False)).scaling


def _check_kind(config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError for an adapter that is not plain LoRA."""
    other = [f"{name}={shorten(config[name])}" for name in OTHER_KINDS if config.get(name)]
    if config.get("bias", "none") != "none":
        other.append(f"bias={shorten(config['bias'])}")
    if (init := config.get("init_lora_weights", True)) not in INITS:
        other.append(
            f"init_lora_weights={shorten(init)}, which has changed the base as well (PEFT's conversion undoes that)"
        )
    if config.get("peft_type") != "LORA" or other:
        raise ModelError(
            f"{path}: only plain LoRA can be read; this has peft_type={shorten(config.get('peft_type'))} with "
            f"{', '.join(other) or 'nothing else'}. PEFT's merge_and_unload writes the adapter as a model."
        )
