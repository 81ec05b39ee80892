"""Writer and reader of PEFT's adapter files for Surefoot's LoRA parameters.

`peft_layout` says how the files name and lay out what the model has. Routers trained in full are stored in full with
their buffers, as PEFT's `modules_to_save`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from surefoot.config.documents import shorten
from surefoot.errors import ModelError
from surefoot.models.expert_layouts import GATED, Stack, expert_stacks
from surefoot.models.hubs import MODELSCOPE
from surefoot.models.lora import LoraSettings, attachable_names, is_lora
from surefoot.models.peft_layout import LORA, PeftLayout, join_pair, order_stacks, split_targets
from surefoot.models.resolve_model import read_json_object
from surefoot.models.routing import router_weight_owners
from surefoot.models.safetensors_writer import tensor_file

PREFIX = "base_model.model."
WRAPPED = ".base_layer."
"""Part of the keys of layers that PEFT stores with their pairs, such as output layers, and of nested pairs."""
OF_EMBEDDINGS = ".lora_embedding_"
"""Part of the keys of low-rank pairs of embeddings."""
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
STACKS = (*GATED, "down_proj")
"""Names of stacks of experts in most models."""
MOST_RANK, MOST_ALPHA = 1_000_000, 1e9
FIRST_LAYER = re.compile(r".*?\.[^.]*\.(\d{1,9})\.", re.ASCII)
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of PEFT's init_lora_weights under which the base stays unchanged. PiSSA, OLoRA and similar change it when the
adapter is created, so that the adapter belongs to weights that are saved nowhere."""
OTHER_KINDS = (
    "use_dora", "lora_bias", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config",
    "trainable_token_indices", "ensure_weight_tying", "megatron_config", "layers_pattern",
)  # fmt: skip
"""PEFT settings that combine a pair of matrices in another way than plain LoRA, or choose other modules."""
PATTERN = r"(.*\.)?({})$"
"""How a pattern is compared with a name. Source: get_pattern_key in peft.utils.other."""
RANK_NEEDED, ALPHA_NEEDED = "a whole number above 0", "a number"
PATTERNS = ("rank_pattern", "alpha_pattern")
"""PEFT settings that give some modules a rank or an alpha of their own. PEFT sets them itself for stacks of experts."""
SELECTIONS = ("exclude_modules", "layers_to_transform")
"""PEFT settings that leave out modules that `target_modules` names."""


def write_adapter(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    values: Iterable[tuple[str, Tensor]],
    settings: LoraSettings,
    base_model: str,
    model: PreTrainedModel,
) -> None:
    """Write trained parameters as a PEFT adapter into an existing empty folder.

    `shapes`: shapes of all parameters, by the model's names, and of the `tensors_beside` them. `values` come
    in the same order; none is kept. `model` is read for its names alone.
    """
    layout = PeftLayout(model)

    def convert(name: str, value: Tensor) -> tuple[str, Tensor]:
        key, as_stored = layout.convert_to_file(name, value, shapes)
        return f"{PREFIX}{layout.spell(key)}", as_stored

    empty = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    with tensor_file(folder / WEIGHTS, dict(convert(name, spec) for name, spec in empty.items())) as file:
        for name, value in values:
            file.write(*convert(name, value.detach().float()))
    (folder / CONFIG).write_text(json.dumps(_build_peft_config(shapes, settings, base_model, model), indent=2) + "\n")


def tensors_beside(model: PreTrainedModel, trained: Collection[str]) -> list[str]:
    """Return what else the modules hold that are trained in full: PEFT stores such modules with all they hold.

    A router of DeepSeek-V3 has a buffer that it adds to its scores.
    """
    owners = tuple(f"{name.rpartition('.')[0]}." for name in trained if not is_lora(name))
    return [name for name in model.state_dict() if name.startswith(owners) and name not in trained]


def get_tensor(model: PreTrainedModel, name: str) -> Tensor:
    """Return a parameter or a buffer."""
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), leaf)
    return tensor


def _build_peft_config(
    parameters: Collection[str], settings: LoraSettings, base_model: str, model: PreTrainedModel
) -> dict[str, Any]:
    linears = {name.removesuffix(".lora_A") for name in parameters if name.endswith(".lora_A")}
    stacks = {name.removesuffix("_lora_A") for name in parameters if name.endswith("_lora_A")} - linears
    saved = {name.rpartition(".")[0] for name in parameters if not is_lora(name)}
    routers = {name for name in saved if not any(name.startswith(f"{owner}.") for owner in saved)}
    modules, target_parameters = split_targets(model, linears, stacks)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0 if target_parameters else settings.dropout,  # PEFT has no dropout on parameters
        "use_rslora": settings.rslora,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(model.get_submodule(name), Conv1D) for name in linears),
        "target_modules": sorted(modules),
        "target_parameters": sorted(target_parameters) or None,
        "modules_to_save": sorted({_name_for_peft(name, routers, model) for name in routers}) or None,
    }


def _name_for_peft(router: str, routers: Collection[str], model: PreTrainedModel) -> str:
    """Return the end of a router's name by which PEFT finds it, or all of it if the end also names another module."""
    end = ".".join(router.split(".")[-2:])
    is_shared = any(name.endswith(end) and name not in routers for name, _ in model.named_modules())
    return router if is_shared else end


def read_adapter(
    folder: Path, expected_shapes: Mapping[str, torch.Size], settings: LoraSettings, model: PreTrainedModel
) -> dict[str, Tensor]:
    """Read a PEFT adapter into the model's names and shapes. `model` is read for its names alone.

    `expected_shapes`: the model's trainable parameters, by name. The file must contain all of them and nothing else
    but the `tensors_beside` them, which are the base's.
    Raises: ModelError if the folder is not an adapter, or its settings, names or shapes differ.
    """
    layout = PeftLayout(model)
    config, stored = _load_for_model(folder, layout)
    _check_can_be_continued(folder, config, stored)
    run_values = {"lora_rank": settings.rank, "lora_alpha": settings.alpha, "use_rslora": settings.rslora}
    adapter_values = {
        "lora_rank": config["r"],
        "lora_alpha": config["lora_alpha"],
        "use_rslora": config.get("use_rslora", False),
    }
    different = [
        f"{name}={run_values[name]} but the adapter has {adapter_values[name]}"
        for name in run_values
        if run_values[name] != adapter_values[name]
    ]
    if different:
        raise ModelError(f"init_adapter={folder}: {'; '.join(different)}. Set the same values.")
    keys = {
        name: layout.convert_to_file(name, torch.empty(shape, device="meta"), expected_shapes)
        for name, shape in expected_shapes.items()
    }
    _check_targets(folder, {key for key, _ in keys.values()}, stored.keys(), config, settings)
    values = {}
    for name, (key, as_stored) in keys.items():
        value = stored.pop(key)
        if value.shape != as_stored.shape:
            raise ModelError(
                f"init_adapter={folder}: {PREFIX}{key} has shape {tuple(value.shape)} there, "
                f"{tuple(as_stored.shape)} here. Is it the model this adapter was trained on?"
            )
        values[name] = layout.convert_from_file(name, value, expected_shapes[name])
    return values


def _check_can_be_continued(folder: Path, config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raise ModelError for an adapter that is more than the low-rank pairs of one rank, which a run trains."""
    reasons = [f"{name}={config[name]!r} gives some modules their own" for name in PATTERNS if config.get(name)]
    reasons += [
        f"it holds {PREFIX}{key}, a whole layer beside its pair" for key in stored if WRAPPED in key and LORA not in key
    ]
    if reasons:
        raise ModelError(
            f"init_adapter={folder}: {'; '.join(reasons)}. A run trains pairs of one lora_rank and lora_alpha, and "
            f"nothing beside them. `surefoot export {folder} MODEL --merge` writes a model that can be trained on."
        )


def _check_targets(
    folder: Path, expected: Collection[str], stored: Collection[str], config: Mapping[str, Any], settings: LoraSettings
) -> None:
    """Raise ModelError, with both lists of targets, unless an adapter holds exactly the tensors that a run trains."""
    in_full = tuple(f"{key.rpartition('.')[0]}." for key in expected if ".lora_" not in key)
    missing = sorted(set(expected) - set(stored))
    surplus = sorted(key for key in set(stored) - set(expected) if not key.startswith(in_full))
    if not missing and not surplus:
        return
    details = [f"it has no {PREFIX}{missing[0]} (one of {len(missing)})"] if missing else []
    details += [f"it also adapts {PREFIX}{surplus[0]} (one of {len(surplus)})"] if surplus else []
    raise ModelError(
        f"init_adapter={folder}: the adapter was trained with {_describe_targets(config)}, and this run trains "
        f"target_modules={list(settings.targets)}: {'; '.join(details)}. Set target_modules to what the adapter has."
    )


def load_adapter_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a plain LoRA adapter in PEFT's format, as stored.

    Raises: ModelError for a missing adapter, an adapter of another kind, and settings of wrong types.
    """
    path, weights = folder / CONFIG, folder / WEIGHTS
    needs = f"{folder} is no PEFT adapter: it needs a readable {CONFIG} and {WEIGHTS}"
    try:
        config = read_json_object(path)
    except ModelError as error:
        raise ModelError(f"{needs} ({error})") from error
    check_kind(config, path)
    _check_types(config, path)
    if weights.exists() and not weights.is_file():  # opening a pipe would wait for its other end
        raise ModelError(f"{needs} ({weights} is not a file).")
    try:
        return config, load_file(weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{needs} ({weights}: {error}).") from error


def _load_for_model(folder: Path, layout: PeftLayout) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of an adapter, by the keys that they would have without PEFT's renaming."""
    config, stored = load_adapter_files(folder)
    if key := next((key for key in stored if OF_EMBEDDINGS in key), None):
        raise ModelError(
            f"{folder}: {key} is a low-rank pair of embeddings, which cannot be read. PEFT's merge_and_unload writes "
            "the adapter as a model."
        )
    return config, {layout.read_key(key.removeprefix(PREFIX)): value for key, value in stored.items()}


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
    layers = config.get("layers_to_transform")
    if layers is not None and any(
        type(layer) is not int for layer in (layers if isinstance(layers, list) else [layers])
    ):
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


def _check_modules_named(
    folder: Path, config: Mapping[str, Any], stored: Iterable[str], find_leaves: Callable[[str], Iterable[str]]
) -> None:
    """Raise ModelError for a tensor of a module that the config does not name: PEFT would ignore it."""
    for key in stored:
        owner, is_pair, _ = key.rpartition(".lora_")
        module = owner.replace(".base_layer", "")
        parameters = [f"{module}.{leaf}" for leaf in (*find_leaves(module), "weight")]
        is_parameter = any(_is_named(parameter, config.get("target_parameters")) for parameter in parameters)
        if is_pair and not is_parameter and not _is_selected(module, config):
            raise ModelError(
                f"{folder}: {WEIGHTS} adapts {module}, which {CONFIG} leaves out ({_describe_targets(config)}). "
                "Nothing was written. Are the two files of the same adapter?"
            )


def _is_named(module: str, names: str | Iterable[str] | None) -> bool:
    """Return whether names, or a regular expression of full names, mean a module."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names or ())


def _is_selected(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT adapts a linear module. Source: check_target_module_exists in peft.tuners.tuners_utils."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    if not _is_named(module, targets) or _is_named(module, config.get("exclude_modules")):
        return False
    if layers in (None, []) or isinstance(targets, str) or module in targets:
        return True
    number = FIRST_LAYER.match(module)
    return number is not None and int(number[1]) in (layers if isinstance(layers, list) else [layers])


def _describe_targets(config: Mapping[str, Any]) -> str:
    names = ("target_modules", "target_parameters", "modules_to_save", *SELECTIONS)
    return ", ".join(f"{name}={config[name]!r}" for name in names if config.get(name)) or "no targets"


@dataclass(frozen=True)
class LowRank:
    """A weight's low-rank pair. Shapes: a [r, in], b [out, r]; for a stack of experts a [E, r, in], b [E, out, r]."""

    a: Tensor
    b: Tensor
    is_transposed: bool = False
    """Whether the weight is stored as [in, out], a stack as [E, in, out]."""
    is_flat: bool = False
    """Whether a stack is stored as a matrix, one expert below the other."""
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def shape(self) -> torch.Size:
        """Shape of the adapted weight."""
        sides = (self.a.shape[-1], self.b.shape[-2]) if self.is_transposed else (self.b.shape[-2], self.a.shape[-1])
        shape = torch.Size((*self.a.shape[:-2], *sides))
        return torch.Size((shape[0] * shape[1], shape[2])) if self.is_flat else shape

    def multiply(self, expert: int | None) -> Tensor:
        """Return the scaled product in the weight's layout and float32, of one expert or of all."""
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        product = self.scaling * (b.float() @ a.float())
        product = product.mT if self.is_transposed else product
        return product.flatten(0, 1) if self.is_flat and expert is None else product


@dataclass(frozen=True)
class AdapterContents:
    """Contents of an adapter by the names of the model's parameters."""

    folder: Path
    low_rank: dict[str, LowRank]
    whole: dict[str, Tensor]
    """Parameters that were trained in full, and others that are stored in full."""

    def as_parameters(self, model: PreTrainedModel) -> "AdapterParameters":
        """Return the adapter as LoRA of one rank of a model, which is read for its names and shapes alone."""
        self._check_fits(model)
        stacks, adaptable, routers = dict(expert_stacks(model)), attachable_names(model), router_weight_owners(model)
        pairs, updates = {}, {}
        for name, pair in self.low_rank.items():
            module = name if name in stacks else name.removesuffix(".weight")
            if module in adaptable:
                pairs[module] = pair
            else:
                updates[name] = pair.multiply(None)
        rank = max((pair.rank for pair in pairs.values()), default=1)
        scaling = next((pair.scaling for pair in pairs.values() if pair.scaling), 1.0)
        values = dict(self.whole)
        for name, pair in pairs.items():
            start = f"{name}_lora" if name in stacks else f"{name}.lora"
            missing = rank - pair.rank
            b = pair.b if pair.scaling == scaling else pair.b.float() * (pair.scaling / scaling)
            values[f"{start}_A"] = F.pad(pair.a, (0, 0, 0, missing))
            values[f"{start}_B"] = F.pad(b, (0, missing))
        modules, parameters = split_targets(model, pairs.keys() - stacks.keys(), pairs.keys() & stacks.keys())
        in_full = ["router"] if any(name.rpartition(".")[0] in routers for name in self.whole) else []
        settings = LoraSettings(rank, scaling * rank, targets=(*sorted(modules), *sorted(parameters), *in_full))
        return AdapterParameters(settings, values, updates)

    def _check_fits(self, model: PreTrainedModel) -> None:
        """Raise ModelError unless a model has the weights that the adapter is for."""
        tensors: Iterable[tuple[str, Tensor]] = (*model.named_parameters(), *model.named_buffers())
        shapes = {name: tensor.shape for name, tensor in tensors}
        ties: dict[str, str] = model.all_tied_weights_keys
        parts = {name: pair.shape for name, pair in self.low_rank.items()}
        parts |= {name: weight.shape for name, weight in self.whole.items()}
        for name, part in parts.items():
            shape = shapes.get(ties.get(name, name))
            if shape != part:
                there = f"has shape {tuple(shape)} there" if shape is not None else "is not there"
                raise ModelError(
                    f"{self.folder} has a part of shape {tuple(part)} for {name}, which {there}. Is "
                    f"{model.name_or_path} the base this adapter was trained on?"
                )


@dataclass(frozen=True)
class AdapterParameters:
    """An adapter as LoRA of one rank: smaller pairs have zeros beside them, those of another scaling another B."""

    settings: LoraSettings
    values: dict[str, Tensor]
    """Values of parameters, by name."""
    updates: dict[str, Tensor]
    """What is added to weights that are adapted by PEFT and not here: those of routers and indexers, for example."""

    @torch.no_grad()
    def load_into(self, model: PreTrainedModel) -> None:
        """Load the adapter into a model that was built with its settings."""
        ties: dict[str, str] = model.all_tied_weights_keys
        for name, value in self.values.items():
            weight = get_tensor(model, name)
            if name in {*ties, *ties.values()} and not torch.equal(value.to(weight), weight):
                raise ModelError(
                    f"the adapter holds {name} in full, trained apart from the weight with which the model shares it. "
                    "That cannot be opened here: PEFT opens it, and its merge_and_unload writes it as a model."
                )
            weight.copy_(value)
        for name, update in self.updates.items():
            weight = get_tensor(model, name)
            total = weight.float()
            weight.copy_(total + update.to(total))


def read_contents(folder: Path, model: PreTrainedModel) -> AdapterContents:
    """Read a PEFT adapter as weights of the base model, of which `model` gives names and layout, no values.

    Raises: ModelError if it is not a plain LoRA adapter.
    """
    config, stored = _load_for_model(folder, PeftLayout(model))
    modules = dict(model.named_modules())
    stacks: dict[str, dict[str, Stack]] = {}
    for name, stack in expert_stacks(model):
        stacks.setdefault(name.rpartition(".")[0], {})[stack.leaf] = stack

    def find_leaves(module: str) -> Iterable[str]:
        """Return the stacks of a module, by the usual names if it is of another model."""
        return stacks.get(module, () if module in modules else STACKS)

    _check_modules_named(folder, config, stored, find_leaves)
    low_rank, full_weights = {}, {}
    for key in stored:
        other = key.replace(".lora_A.", ".lora_B.") if ".lora_A." in key else key.replace(".lora_B.", ".lora_A.")
        if other not in stored:
            raise ModelError(
                f"{folder}: {PREFIX}{key} is one half of a pair; {PREFIX}{other} is not there. Nothing was written."
            )
    for name, a in stored.items():
        if name.endswith(".lora_A.weight"):
            owner, b = name.removesuffix(".lora_A.weight"), stored[name.replace(".lora_A.", ".lora_B.")]
            module = owner.replace(".base_layer", "")
            leaf = _find_stack(owner, find_leaves(module), config.get("target_parameters"))
            is_parameter = leaf is None and _is_named(f"{module}.weight", config.get("target_parameters"))
            adapted = f"{module}.{leaf or 'weight'}" if leaf or is_parameter else module
            rank, scaling = _read_strength(config, adapted)
            is_pair = a.dim() == b.dim() == 2 and min(*a.shape, *b.shape) > 0 and a.shape[0] == b.shape[1]
            if not is_pair or (a.shape[0] % rank if leaf else a.shape[0] != rank):
                raise ModelError(
                    f"{folder}: {PREFIX}{name} has shape {tuple(a.shape)} and its other half {tuple(b.shape)}, which "
                    f"are no pair of rank {rank}. Nothing was written."
                )
            if leaf is None:
                is_transposed = isinstance(modules.get(module), Conv1D)
                low_rank[f"{owner}.weight"] = LowRank(a, b, is_transposed, scaling=scaling)
            elif module not in stacks:  # of another model: the pair finds no weight
                low_rank[f"{module}.{leaf}"] = LowRank(a, b, scaling=scaling)
            else:
                stack = stacks[module][leaf]
                is_flat = getattr(stack.owner, leaf).dim() == 2
                low_rank[f"{module}.{leaf}"] = LowRank(
                    *join_pair(a, b, rank, stack), stack.is_transposed, is_flat, scaling
                )
        elif not name.endswith(".lora_B.weight"):
            full_weights[name.replace(WRAPPED, ".")] = a
    return AdapterContents(folder, low_rank, full_weights)


def _find_stack(owner: str, leaves: Iterable[str], target_parameters: Iterable[str] | None) -> str | None:
    """Return the stack that the pair of a (nested) module in a file adapts; None if it adapts no stack."""
    module = owner.replace(".base_layer", "")
    adapted = order_stacks(leaf for leaf in leaves if _is_named(f"{module}.{leaf}", target_parameters))
    depth = owner.count(".base_layer")
    return adapted[-1 - depth] if depth < len(adapted) else None


def _read_strength(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank and the scaling of a module or a parameter."""

    def find(setting: str, default: Any) -> Any:
        patterns = (config.get(setting) or {}).items()
        return next((value for key, value in patterns if re.match(PATTERN.format(key), name)), default)

    rank, alpha = find("rank_pattern", config["r"]), find("alpha_pattern", config["lora_alpha"])
    return rank, LoraSettings(rank, alpha, rslora=config.get("use_rslora", False)).scaling


def check_kind(config: Mapping[str, Any], path: Path = Path(CONFIG)) -> None:
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
            f"{', '.join(other) or 'nothing else'}."
        )


def base_name(source: str, base: Path) -> str:
    """Return the adapter's name of its base: the hub id, which is valid everywhere, or else the local folder."""
    return str(base) if source.startswith(("pypi:", MODELSCOPE)) or Path(source).is_dir() else source
