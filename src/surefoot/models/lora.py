"""LoRA modules of Surefoot. Base parameters keep their names; `lora_A` and `lora_B` are added beside them, and with
DoRA `lora_magnitude`.

They are created before the model is sharded (on the meta device), so a LoRA parameter gets its base's placement; its
initial value depends on (seed, parameter name) alone, never on rank or topology.

Independent of files: `adapter.py` translates to PEFT's format.

Source: Hu et al., https://arxiv.org/abs/2106.09685; rank-stabilised scaling: Kalajdzievski, https://arxiv.org/abs/2312.03732;
DoRA: Liu et al., https://arxiv.org/abs/2402.09353
"""

import difflib
import hashlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel

from surefoot.config import RunConfig
from surefoot.config.schema import REGULAR_EXPRESSION
from surefoot.errors import ModelError
from surefoot.models.decoder_layers import class_name, decoder_layers, decoder_of, indexer_names
from surefoot.models.dtensor_blocks import block_of
from surefoot.models.expert_layouts import WITHOUT_STACKS, Stack, expert_stacks
from surefoot.models.lora_linear import ADAPTED_CLASSES, MAGNITUDE, adopt, can_adopt, create_parameter, is_plain
from surefoot.models.quantization.base import FLOAT, WeightFormat, keep_stored
from surefoot.models.quantization.formats import Int8Format, Nf4Format
from surefoot.models.routing import router_weight_owners
from surefoot.models.score_head import head_of
from surefoot.models.vision import vision_parts

GROUPS = ("attention", "mlp", "linear", "experts", "router", "all", "vision")
IN_LAYER = re.compile(r"\.\d+\.", re.ASCII)
OF_ONE_EXPERT = re.compile(r"\bexperts\.\d+\.", re.ASCII)
"""Name of a linear layer in a list of experts that are modules of their own."""
OF_MLP_BLOCKS = ("mlp", "feed_forward", "ffn")
OF_MIXERS = {
    "mixer": frozenset({"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"}),
    "mamba": frozenset({"in_proj"}),
    "conv": frozenset({"in_proj", "out_proj"}),
    "temporal_block": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "linear_x", "linear_y", "linear_out"}),
}
"""Parts that are or replace attention, and their linear layers (Mamba, Nemotron-H, Jamba, LFM2, RecurrentGemma).
Kernels read the weights of a state space's other layers (`x_proj`, `dt_proj`, `out_proj`) without calling them."""
OF_BARE_MLPS = ("fc1", "fc2")
"""Names of the MLP's linear layers where the decoder layer itself owns them (OPT, XGLM)."""
OF_MLPS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of linear layers in dense MLPs and shared experts, and in some models in experts."""


@dataclass(frozen=True)
class LoraSettings:
    """Settings of LoRA: targets, rank and scaling, and the format of the weights beside it."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    """Whether linear layers learn the length of each row apart from its direction."""
    targets: tuple[str, ...] = ("attention", "experts")
    layers: tuple[int, ...] | None = None
    """Numbers of the decoder layers whose targets are adapted; None for all targets, also outside of layers."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of the names of modules that are trained in full."""
    seed: int = 0
    weight_format: WeightFormat = FLOAT
    """How the frozen weights of the decoder's linear layers and experts are stored."""

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_settings(config: RunConfig) -> LoraSettings | None:
    """Return the LoRA settings of a config; None for full fine-tuning."""
    if config.tuning == "full":
        return None
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    return LoraSettings(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        rslora=config.use_rslora,
        dora=config.use_dora,
        targets=tuple(targets),
        layers=tuple(config.layers_to_transform) if config.layers_to_transform is not None else None,
        modules_to_save=tuple(config.modules_to_save),
        seed=config.seed,
        weight_format=format_of_frozen(config),
    )


def format_of_frozen(config: RunConfig) -> WeightFormat:
    """Return the format of a run's frozen weights."""
    match config.quantization:
        case "nf4":
            return Nf4Format(config.quantization_block_size, config.double_quantization)
        case "int8":
            return Int8Format()
        case None:
            return FLOAT


@dataclass(frozen=True)
class LoraTargets:
    """Modules and parameters of a model that the target groups and names matched."""

    linears: list[str] = field(default_factory=list)
    """Names of linear modules."""
    experts: list[str] = field(default_factory=list)
    """Names of stacks of experts (`model.layers.0.mlp.experts.gate_up_proj`)."""
    routers: list[str] = field(default_factory=list)
    """Names of the modules that hold the matrices of routers, which are small and trained in full."""
    whole: list[str] = field(default_factory=list)
    """Names of further parameters that are trained in full, those of `modules_to_save`."""

    @property
    def in_full(self) -> set[str]:
        """Names of all parameters that are trained in full."""
        return {*self.whole, *(f"{name}.weight" for name in self.routers)}


def find_targets(model: PreTrainedModel, targets: Iterable[str]) -> LoraTargets:
    """Resolve groups (`GROUPS`) and names to modules and parameters of `model`.

    A name matches a linear module or an expert parameter whose full name equals it or ends with `.name`. Modules of a
    vision tower, and of indexers, which nothing trains, are matched by full name only, because some have the same names
    as modules of the decoder. A regular expression matches full names, as in PEFT, of all but routers and indexers.
    Raises: ModelError for a target that matches nothing, with the nearest names.
    """
    groups, stacks = _collect_groups(model), dict(expert_stacks(model))
    in_tower, linears = set(groups["vision"]), _linear_names(model)
    untrained = _in_indexers(model, linears)
    chosen: set[str] = set()
    for target in targets:
        if target in groups:
            matches = set(groups[target])
        elif REGULAR_EXPRESSION.search(target):
            pattern = re.compile(target)
            matches = {name for name in linears | stacks.keys() if pattern.fullmatch(name)}
            matches -= {*groups["router"], *untrained}
        else:
            # `down_proj` means the linear layers; stacks of experts are named with their module: `experts.down_proj`.
            named = linears | (stacks.keys() if "." in target else set())
            spellings = (target, target.removesuffix(".weight"))  # adapters name some linear layers by their weight
            matches = {
                n
                for n in named
                if n in spellings
                or (n.endswith(tuple(f".{name}" for name in spellings)) and n not in in_tower | untrained)
            }
        if not matches:
            raise ModelError(_describe_missing_target(target, groups, model))
        chosen |= matches
    order, routers = [name for name, _ in model.named_modules()], chosen & set(groups["router"])
    return LoraTargets(
        linears=[name for name in order if name in chosen & linears - routers],
        experts=[name for name, _ in model.named_parameters() if name in chosen & stacks.keys()],
        routers=[name for name in order if name in routers],
    )


def experts_left_out(model: PreTrainedModel, targets: Iterable[str]) -> list[str]:
    """Return the targets that include experts in other models, if no experts of this model are adapted.

    In models whose experts are single linear layers `down_proj` names them; here they are stacks, named `experts`.
    """
    owners = {stack.owner for _, stack in expert_stacks(model)}
    if not owners or any(parameter.requires_grad for owner in owners for parameter in owner.parameters(recurse=False)):
        return []
    return [target for target in targets if target in OF_MLPS]


def tower_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear modules of the model's vision tower."""
    return set(_collect_groups(model)["vision"])


def adaptable_names(model: PreTrainedModel) -> set[str]:
    """Return the names of every linear module and every stack of experts of a model."""
    return _linear_names(model) | dict(expert_stacks(model)).keys()


def attachable_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear modules and stacks of experts of a model that can be given a low-rank pair."""
    linears = _linear_names(model)
    linears -= {*router_weight_owners(model), *_in_indexers(model, linears)}
    return {name for name in linears if can_adopt(model.get_submodule(name))} | dict(expert_stacks(model)).keys()


def _linear_names(model: PreTrainedModel) -> set[str]:
    head = head_of(model)  # which is trained in full
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, tuple(ADAPTED_CLASSES)) and module is not head
    }


def _in_indexers(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return the names of modules that are in the model's indexers."""
    prefixes = tuple(f"{name}." for name in indexer_names(model))
    return {name for name in names if name.startswith(prefixes)}


def _collect_groups(model: PreTrainedModel) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    groups["router"] = router_weight_owners(model)
    groups["vision"] = [
        f"{part}.{name}".rstrip(".")
        for part, owner in vision_parts(model).items()
        for name, module in owner.named_modules()
        # torch's own attention reads the weight of the latter without calling it.
        if isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    ]
    prefix = _decoder_prefix(model)
    linears = _linear_names(model)
    linears -= {*groups["vision"], *groups["router"], *_in_indexers(model, linears)}
    for name, module in model.named_modules():
        if name in linears and name.startswith(prefix) and (group := _group_of(name, module)) is not None:
            groups[group].append(name)
    groups["experts"] += [name for name, _ in expert_stacks(model)]
    groups["linear"] = groups["attention"] + groups["mlp"]
    groups["all"] = groups["linear"] + groups["experts"]
    return groups


def _decoder_prefix(model: PreTrainedModel) -> str:
    decoder = decoder_of(model)
    return next((f"{name}." for name, module in model.named_modules() if module is decoder and name), "")


def _group_of(name: str, linear: nn.Module) -> str | None:
    """Return the group of a linear layer of the decoder; None for one that is never adapted as part of a group."""
    if IN_LAYER.search(name) is None or not is_plain(linear):
        return None
    *parents, leaf = name.split(".")
    if "router" in name:
        return None
    if OF_ONE_EXPERT.search(name):
        return "experts"
    is_mixer = any(leaf in OF_MIXERS[part] for part in parents if part in OF_MIXERS)
    if is_mixer or any("attn" in part or "attention" in part for part in parents):
        return "attention"
    is_mlp = leaf in OF_BARE_MLPS or any(word in part for word in OF_MLP_BLOCKS for part in parents)
    is_mlp = is_mlp or "ff" in parents or ("mixer" in parents and leaf in OF_MLPS)  # `ff` is XLNet's
    # A gate with one output (Qwen2-MoE's shared_expert_gate) is too small to adapt.
    return "mlp" if is_mlp and getattr(linear, "out_features", 2) > 1 else None


def _describe_missing_target(target: str, groups: dict[str, list[str]], model: PreTrainedModel) -> str:
    model_name = type(model).__name__
    if target in GROUPS:
        present = [group for group, members in groups.items() if members]
        reasons = {WITHOUT_STACKS.get(type(module).__name__) for module in model.modules()} - {None}
        why = f" ({'; '.join(map(str, reasons))})" if target == "experts" and reasons else ""
        return (
            f"target_modules: the group '{target}' is empty in {model_name}{why}. "
            f"Groups with members: {', '.join(present)}."
        )
    names = adaptable_names(model)
    names -= _in_indexers(model, names)
    if REGULAR_EXPRESSION.search(target):
        shown = [name for name in sorted(names) if IN_LAYER.search(name)][:2]
        return (
            f"target_modules: '{target}' matches nothing in {model_name}. It is matched with whole names, as in PEFT. "
            f"They are like {' and '.join(shown) or ', '.join(sorted(names)[:2])}. Groups: {', '.join(GROUPS)}."
        )
    endings = {".".join(name.split(".")[-2:]) for name in names} | {name.split(".")[-1] for name in names}
    near = difflib.get_close_matches(target, [*GROUPS, *sorted(endings - {target})], n=5, cutoff=0.4)
    leaf_names = sorted({name.split(".")[-1] for name in names} - {target})
    stacks = {name.split(".")[-1] for name in names if name.rpartition(".")[0].endswith("experts")}
    means_stacks = "experts." in target or target.rpartition(".")[2] in {*PARTS_OF_EXPERTS, *stacks}
    fused = "The experts of this model are fused tensors: the group `experts` adapts them, or their own names "
    fused = f"{fused}({', '.join(f'experts.{stack}' for stack in sorted(stacks))}). " if stacks and means_stacks else ""
    return (
        f"target_modules: '{target}' matches nothing in {model_name}. {fused}Nearest: {', '.join(near) or 'none'}. "
        f"Linear modules and expert stacks: {', '.join(leaf_names)}. Groups: {', '.join(GROUPS)}."
    )


PARTS_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of the linear layers of experts that are not fused."""


def checked_targets(model: PreTrainedModel, settings: LoraSettings) -> LoraTargets:
    """Return the targets of these settings in a model. Raises: ModelError for an invalid or unsupported target."""
    targets = _in_layers(find_targets(model, settings.targets), model, settings.layers)
    targets = replace(targets, whole=_find_whole(model, settings, targets))
    if settings.dropout and targets.experts:
        raise ModelError(
            f"lora_dropout={settings.dropout} with {len(targets.experts)} expert stacks among the targets: dropout "
            "cannot be applied inside the grouped expert product, and PEFT refuses it too. Set lora_dropout: 0, or "
            "name targets without experts, such as [attention, mlp]."
        )
    if settings.dora and targets.experts:
        raise ModelError(
            f"use_dora with {len(targets.experts)} expert stacks among the targets: it is of linear layers, here as in "
            "PEFT. Drop use_dora, or name targets without experts, such as linear."
        )
    if settings.dora and not targets.linears:
        raise ModelError("use_dora is of linear layers, and target_modules names none. Drop it, or name some.")
    return targets


def _in_layers(targets: LoraTargets, model: PreTrainedModel, numbers: tuple[int, ...] | None) -> LoraTargets:
    """Return the targets in some layers of the decoder. Raises: ModelError for a layer that it does not have."""
    if numbers is None:
        return targets
    layers = list(decoder_layers(model))
    if missing := [number for number in numbers if number >= len(layers)]:
        raise ModelError(
            f"layers_to_transform: {class_name(model)} has {len(layers)} layers, from 0 to {len(layers) - 1}, and no "
            f"layer {missing[0]}."
        )
    chosen = {layers[number] for number in numbers}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module in chosen)
    inside = LoraTargets(
        *(
            [name for name in names if name.startswith(prefixes)]
            for names in (targets.linears, targets.experts, targets.routers)
        )
    )
    if inside == LoraTargets():
        raise ModelError(f"layers_to_transform: target_modules match nothing in the layers {list(numbers)}.")
    return inside


def _find_whole(model: PreTrainedModel, settings: LoraSettings, targets: LoraTargets) -> list[str]:
    """Return the names of the parameters in the modules that `modules_to_save` names, a shared one by all its names.

    Names are matched as in PEFT, by their last characters. Whether a weight is shared is read from the class and the
    config of the model, because it is tied only after its weights are read.
    Raises: ModelError for a name that matches nothing, and for modules that are trained otherwise, or cannot be.
    """
    if not settings.modules_to_save:
        return []
    ties: dict[str, str] = model.all_tied_weights_keys
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    refusals, in_indexers = _refuse_in_full(model, settings, targets), tuple(f"{n}." for n in indexer_names(model))
    whole: set[str] = set()
    for end in settings.modules_to_save:
        matches = {name for name, _ in model.named_modules() if name.endswith(end)}
        matches -= {name for name in matches if f"{name}.".startswith(in_indexers)}
        inside = {name for name in parameters if name.startswith(tuple(f"{match}." for match in matches))}
        if not inside:
            raise ModelError(_describe_missing_module(end, model, is_there=bool(matches)))
        sources = {ties.get(name, name) for name in inside}
        inside |= {name for name in parameters if ties.get(name, name) in sources}
        matches |= {name.rpartition(".")[0] for name in inside}
        for refused, reason in refusals.items():
            if any(f"{refused}.".startswith(f"{match}.") for match in matches):
                raise ModelError(f"modules_to_save: {end} means {refused}, {reason}.")
        whole |= inside
    return [name for name in parameters if name in whole]


def _refuse_in_full(model: PreTrainedModel, settings: LoraSettings, targets: LoraTargets) -> dict[str, str]:
    """Return the modules that cannot be trained in full beside LoRA, with the reasons."""
    experts = {
        name for name, module in model.named_modules() if any(s.owner is module for _, s in expert_stacks(model))
    }
    quantised = _find_stored(model) if settings.weight_format is not FLOAT else {}
    return (
        dict.fromkeys(indexer_names(model), "in which nothing gets a gradient. Name what is beside it")
        | dict.fromkeys(
            (name.removesuffix(".weight") for name in quantised),
            "whose frozen weights are quantised, and such weights cannot be trained. Name it in target_modules "
            "instead, or set quantization: null",
        )
        | dict.fromkeys(experts, "which is not trained in full beside LoRA. Name experts in target_modules instead")
        | dict.fromkeys(
            [*targets.linears, *(name.rpartition(".")[0] for name in targets.experts)],
            "which target_modules names too: it would be trained twice. Leave it out of one of them",
        )
    )


def _describe_missing_module(end: str, model: PreTrainedModel, *, is_there: bool) -> str:
    holders = {name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    near = difflib.get_close_matches(end, sorted({name.rpartition(".")[2] for name in holders}), n=4, cutoff=0.4)
    problem = "has nothing to train in" if is_there else "is no module of"
    return f"modules_to_save: {end} {problem} {class_name(model)}. Nearest: {', '.join(near) or 'none'}."


def attach(model: PreTrainedModel, settings: LoraSettings) -> LoraTargets:
    """Create the LoRA parameters (uninitialised, on the current device) and return what was adapted."""
    targets = checked_targets(model, settings)
    for name in targets.linears:
        module = model.get_submodule(name)
        if not can_adopt(module):
            raise ModelError(
                f"target_modules: {name} is a {type(module).__name__}, not a plain linear layer; leave it out."
            )
        adopt(module, settings.rank, settings.scaling, settings.dropout, has_magnitude=settings.dora)
    stacks = dict(expert_stacks(model))
    for name in targets.experts:
        _adopt_stack(stacks[name], settings)
    if settings.weight_format is not FLOAT:
        store_frozen_weights(model, settings.weight_format)
    return targets


def _adopt_stack(stack: Stack, settings: LoraSettings) -> None:
    shape_a = (stack.num_experts, settings.rank, stack.in_features)
    shape_b = (stack.num_experts, stack.out_features, settings.rank)
    setattr(stack.owner, f"{stack.leaf}_lora_A", create_parameter(*shape_a))
    setattr(stack.owner, f"{stack.leaf}_lora_B", create_parameter(*shape_b))
    stack.owner.lora_scaling = settings.scaling  # type: ignore[assignment]


def store_frozen_weights(model: PreTrainedModel, weight_format: WeightFormat) -> None:
    """Store in a format what the group `all` names: the decoder's linear layers and experts, adapted or not.

    Raises: ModelError for a weight that the format cannot store.
    """
    check_frozen_weights(model, weight_format)
    for owner, leaf in _find_stored(model).values():
        keep_stored(owner, leaf, weight_format)


def check_frozen_weights(model: PreTrainedModel, weight_format: WeightFormat) -> None:
    """Raise ModelError for a weight of a model that a format cannot store, or if there is none. No weight is read."""
    stored = _find_stored(model)
    if not stored and weight_format is not FLOAT:
        raise ModelError(
            f"quantization: {class_name(model)} has no linear layers or experts of a kind that can be quantised. "
            "Set quantization: null."
        )
    for name, (owner, leaf) in stored.items():
        weight_format.check(name, getattr(owner, leaf).shape)


def _find_stored(model: PreTrainedModel) -> dict[str, tuple[nn.Module, str]]:
    """Return the modules and the names in them of the weights that are stored in a format, by their full names."""
    targets, stacks = find_targets(model, ["all"]), dict(expert_stacks(model))
    linears = {f"{name}.weight": model.get_submodule(name) for name in targets.linears}
    weights = {name: (linear, "weight") for name, linear in linears.items() if isinstance(linear, nn.Linear)}
    return weights | {name: (stacks[name].owner, stacks[name].leaf) for name in targets.experts}


def is_lora(name: str) -> bool:
    """Return whether a parameter of this name was created by `attach`."""
    return name.endswith(("lora_A", "lora_B", MAGNITUDE))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the full initial value of a LoRA parameter in float32: uniform (Kaiming, a = sqrt 5) for A, zeros for B.

    Drawn on the CPU from a generator seeded by (seed, name), so every topology and device gets the same numbers.
    """
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt 5) over fan_in
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Run the model without its LoRA parameters; they stay attached."""
    scalings = {module: module.lora_scaling for module in model.modules() if hasattr(module, "lora_scaling")}
    try:
        for module in scalings:
            module.lora_scaling = 0.0  # type: ignore[assignment]
        yield
    finally:
        for module, scaling in scalings.items():
            module.lora_scaling = scaling


@contextmanager
def perturbed_lora(model: nn.Module, noise: float) -> Iterator[None]:
    """Run the model with normal noise of this deviation in its LoRA parameters, equal on ranks that hold copies."""
    parts = {name: block_of(parameter).local for name, parameter in model.named_parameters() if is_lora(name)}
    before = {name: part.clone() for name, part in parts.items()}
    try:
        for name, part in parts.items():
            drawn = torch.randn(part.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            part.add_(drawn.to(part), alpha=noise)
        yield
    finally:
        for name, part in parts.items():
            part.copy_(before[name])
